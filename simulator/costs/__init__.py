"""Derives the costs of work in seconds from published figures of accelerators and models, or fits them to measured
steps.

The simulator, `penstock fit` and capacity planning take from here:

* `accelerators`: `find_accelerator(name)`, published peaks with efficiency factors (`penstock.sizing`);
  `measured_cpu()` for this machine.
* `roofline`: `roofline_costs(shape, accelerator, tensor_parallel)`, a `CostProfile`; `ridge_batch`, `num_kv_tokens`.
* `step_costs`: `PrefillCosts`, `DecodeCosts` and `LinkCosts`, all that a simulated worker knows of its hardware.
* `cost_file`: `CostProfile`, with `read_costs(path)` and `write_costs(profile, path)`.
* `machine`: `SharedCores` and `StepSpread`, what a machine does to the steps of its workers.
* `records`: `StepRecorder`, records of steps from load reports.
* `fit`: `fit_steps(records)`, the costs that explain records best, and the spread of times that is left.

Nothing here imports torch or ray, reads a clock (except `measured_cpu`), or knows what a simulated worker is.
"""
