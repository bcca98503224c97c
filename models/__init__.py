"""The bundled models: weights and tokenizers in two folders, and `train`, which makes them.

Tests, the demo and benchmarks load the folders by path; nothing that serves imports from here.
"""
