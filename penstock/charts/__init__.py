"""Charts, pages and tables of reports, as SVG, HTML and plain text, without a library, so every command can write them.

`svg.render_svg` renders a `svg.Chart` of series over axes, `bars.render_bars` a `bars.BarChart` of values by row. Their
SVG is a complete file. `html.render_html` puts headings, text, tables and charts into one self-contained HTML file,
where the charts take its colours, light or dark. `table.format_table` and `table.wrap` fit text into a terminal. The
room does not know what the figures mean. `scale` maps values to pixels and `elements` writes the parts of an SVG.
"""
