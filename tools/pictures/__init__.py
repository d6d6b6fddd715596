"""The pictures of the documentation, drawn as SVG: `python -m tools.pictures --write`.

A picture is a function of `concepts` that draws on a `Canvas`. Colours of text and lines are
variables, so that one file reads well on light and on dark paper: standing alone it follows the
system, and inside a page of the site (tools/site_hooks.py puts it there) the site's own switch.
"""
