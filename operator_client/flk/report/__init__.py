"""`flk report`: one HTML file about a job, or about two side by side, that needs no network and no flk.

`collect` reads a job and its logs, `build` makes a `Report` of what was read, `page` the HTML of reports, with the
charts of `charts` and the script that draws them (`script`). `server` serves the page while the job runs.
"""
