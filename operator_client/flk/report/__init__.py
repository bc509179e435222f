"""`flk report`: one HTML file about a job that needs no network and no flk.

`collect` reads a job and its logs, `build` makes a `Report` of what was read, `page` the HTML of it, with the charts
of `charts` and the script that draws them (`script`).
"""
