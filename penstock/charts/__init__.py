"""Charts and pages of reports: SVG and HTML as text, without a plotting library, so that every command can write them.

`svg.render_svg` renders a `svg.Chart` of series over axes, `bars.render_bars` a `bars.BarChart` of values by row. Their
SVG stands alone as a file. `page.render_page` sets headings, text, tables and charts into one HTML file that needs
nothing else; there the charts take the colours of the page, light or dark. The room knows nothing of what the figures
mean. `scale` maps values to pixels and `elements` writes the parts of an SVG.
"""
