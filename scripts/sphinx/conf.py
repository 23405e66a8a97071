"""How Sphinx reads recycle_plugin/docs; scripts/docs calls it."""

from recycle_plugin import __version__

project = "recycle_plugin"
release = __version__
extensions = ["myst_parser"]
html_theme = "furo"
highlight_language = "text"
myst_heading_anchors = 3
nitpicky = True
