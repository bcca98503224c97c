"""The checks of `penstock doctor`: this machine (`local_checks`), and through the controller every worker and every
pair of workers that KV pages travel between (`deployment_checks`, `pair_probe`). `findings` turns answers into findings
with advice; it is pure. The command and the Admin service take `Finding` and the check functions; nothing here changes
a deployment."""
