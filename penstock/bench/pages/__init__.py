"""Reports of results for people: `text` for the terminal, `html` for one self-contained page, whose plots `svg` writes.
Pure: data in, text out.
"""
