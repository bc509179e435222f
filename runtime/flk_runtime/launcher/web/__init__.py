"""What a launcher serves and sends over HTTP: its `metrics_page`, and the protocol of Kubeflow Trainer.

`trainer_status` takes what clients in the script post, and `trainer_forward` tells Trainer how far the job is.
"""
