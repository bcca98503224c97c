"""Turns prompts into token ids as the checkpoint says: tokenizer, chat template and the model's defaults.

Other rooms take `Tokenizer`, `ModelCard` and `FairThreads`, which runs such work in turns by tenant. A chat template is
untrusted code and runs in a process of its own. Detokenizing and stop strings are in `penstock.text`, which workers
share. This room knows no requests and no workers.
"""
