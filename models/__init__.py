"""The bundled models: weights and tokenizers, a folder each, and `train`, which makes them.

Tests, the demo and benchmarks load the folders by path, and nothing that serves imports from here. The wheel holds
`penstock-tiny`, which `penstock serve --model penstock-tiny` finds wherever the package is installed.
"""
