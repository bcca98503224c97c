"""Imports GGUF files: writes the checkpoint folder that the same model would have on Hugging Face.

The command line takes `write_folder.import_gguf`. Everything else in Penstock reads folders and knows no GGUF: values
are dequantized once, here. Nothing here knows devices, layers or kernels.
"""
