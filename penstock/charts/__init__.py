"""Charts and pages of reports: SVG and HTML as text, without a plotting library, so that every command can write them.

`svg.Chart` holds series and axes, and `svg.render_svg` returns the SVG; `page.render_page` sets headings, text,
tables and charts into one HTML file that needs nothing else. The room knows nothing of what the figures mean.
"""
