"""Computes prompts beside decode steps, if `decode.prompt_sm_share` is set: what the prompt stream computes next, and
who gives it that.

The worker takes `PromptSteps` from its scheduler, and `StepDriver` has a `PromptDriver`. Nothing here decides where a
prompt is computed (`decode_worker.prefill`) or owns pages.
"""
