"""Observe a job in a cluster: the requests that read it, the follower that watches it, the view of its objects.

`flk.observe.client` sends the requests, `flk.observe.follower` watches a job and its pods, and `flk.observe.view` says
what the objects of one moment mean, without requests. Everything above imports this package; it re-exports nothing.
"""
