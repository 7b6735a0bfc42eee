"""The documentation site: generated pages, figures and the strict build.

`python -m website write` writes the generated pages; `python -m website build` builds the site into
build/site; `python -m website check` fails if a generated page is out of date, a page or anchor is
missing, or the built site would load anything from the network.
"""
