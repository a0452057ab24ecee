"""The plots that report and paper share: plain arrays in, a matplotlib figure out; `drawing.save` writes a file.

A figure is 6.3 inches wide, a page's column, or `drawing.NARROW`, a telephone's; its letters have 8 points or more.
A method's title and style are those of `igeood.METHODS`.
"""
