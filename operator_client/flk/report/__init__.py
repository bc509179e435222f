"""`flk report`: one HTML file about a job that needs no network and no flk.

`build` reads a job and its logs and makes a `Report` of what was read, `page` the HTML of it, with the charts of
`charts`.
"""
