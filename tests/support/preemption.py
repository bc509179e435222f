"""A training script for tests of preemption: the final loss shows whether a step was lost or made twice."""

TRAIN = """
    import os, pathlib, sys, time
    import torch, torch.nn.functional as F
    from torch.utils.data import TensorDataset
    import flk_runtime as flk

    steps, pause, save_seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    save = torch.save

    def slow_save(content, file, **options):
        if isinstance(content, dict) and "objects" in content:  # a checkpoint
            pathlib.Path("saving").touch()
            print("saving a checkpoint")
            time.sleep(save_seconds)
        save(content, file, **options)

    torch.save = slow_save
    with flk.init(log_every=5) as run:
        torch.manual_seed(0)
        x = torch.randn(512, 8)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        loader = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
        print(f"begins at step {run.steps}")
        while run.steps < steps:
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(pause)
                run.step()
                while pathlib.Path("evaluate").exists():
                    pathlib.Path("evaluating").touch()
                    time.sleep(0.1)
                pathlib.Path(f"step.{run.rank}").write_text(str(run.steps))
                if run.steps == steps:
                    break
        run.log(final=run.mean(loss.item()))
"""
