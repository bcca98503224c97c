"""Turns prompts into token ids as the checkpoint says: tokenizer, chat template and the model's defaults.

Other rooms take `Tokenizer`, `ModelCard` and `FairThreads`, which runs such work in turns by tenant. A chat template is
untrusted code: `chat_template` renders it in a process of its own (`template_sandbox`) with what `template_functions`
lets it call. Detokenizing and stop strings are in `penstock.text`, which workers share. This room knows no requests and
no workers.
"""
