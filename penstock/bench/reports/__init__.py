"""Reports of results for people: `text` for the terminal, `html` for one self-contained HTML file of tables and charts.
Pure: data in, text out.
"""
