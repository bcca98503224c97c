"""Turns prompts into token ids by the checkpoint's files: tokenizer, chat template and the model's defaults.

Other rooms use `Tokenizer`, `ModelCard` and `FairThreads`, which lets tenants take turns at such work. A chat template
is untrusted code: `chat_template` has it rendered in a process of its own (`template_sandbox`), where it can call only
what `template_functions` defines. Detokenizing and stop strings are in `penstock.text`, which workers share. The room
must not know requests or workers.
"""
