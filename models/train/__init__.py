"""Trains the bundled model and its draft: the corpus, the grammars that it is written from, and the training script.

`python -m models.train.train` trains, `python -m models.train.corpus` prints a sample of the text. The benchmark of
quantization quality and the tests take `corpus.documents`. Nothing that serves imports from here.
"""
