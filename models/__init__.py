"""The bundled model: the text that it learns from, its training script and its weights. Nothing serves from here."""
