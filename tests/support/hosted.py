"""Trainings of other packages whose state flk keeps, as scripts: rank 1 dies at two steps, or a rank waits.

With the argument ``dies`` a script trains again without flk at its end, and prints ``equal`` if both are the same. With
``theirs`` others then go on from a checkpoint of the other package, unless flk has one. Its ranks must share a folder.
"""

from __future__ import annotations

from typing import Final

# How a rank dies.
KILLED: Final = "os.kill(os.getpid(), signal.SIGKILL)"

# Two epochs of six steps of two micro-batches, with dropout and two evaluations in each epoch.
TRANSFORMERS: Final = """
    import os, pathlib, shutil, signal, sys, time, torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    from flk_hosts import transformers as flk_transformers
    from flk_runtime.shared.progress import Phase, own_page

    ATTEMPT, RANK = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    DIES = {0: 4, 1: 7} if sys.argv[1] == "dies" else {}

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 48
        def __getitem__(self, index):
            if index >= 48:
                raise IndexError
            sequence = torch.arange(index, index + 8) % 16
            return {"input_ids": sequence, "labels": sequence}

    phases, begun = set(), []

    class Faults(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            begun.append(state.global_step)
        def on_substep_end(self, *_, **__):
            phases.add(("train", Phase(own_page().phase).name))
        def on_prediction_step(self, *_, **__):
            phases.add(("evaluate", Phase(own_page().phase).name))
        def on_save(self, *_, **__):
            phases.add(("save", Phase(own_page().phase).name))
        def on_log(self, args, state, control, logs, **_):
            logs["tokens"] = 7  # a name of flk's
        def on_step_end(self, args, state, control, **_):
            if DIES.get(ATTEMPT) == state.global_step and RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "waits":
                pathlib.Path(f"step.{ATTEMPT}.{RANK}").write_text(str(state.global_step))
                while state.global_step == 3 and ATTEMPT == 0 and not pathlib.Path("go").exists():
                    time.sleep(0.01)

    def trainer(faults, folder, epochs=2, **more):
        set_seed(3)
        config = LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=8, attention_dropout=0.3,
        )
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=epochs,
            learning_rate=1e-2, logging_steps=3, eval_strategy="steps", eval_steps=3, report_to="none",
            disable_tqdm=True, use_cpu=True, include_num_input_tokens_seen="all", **more,
        )
        made = Trainer(
            model=LlamaForCausalLM(config), args=arguments, train_dataset=Data(), eval_dataset=Data(),
            callbacks=[Faults()] if faults else [],
        )
        return made

    def told(trainer):
        kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen", "train_loss")
        return [{name: each[name] for name in kept if name in each} for each in trainer.state.log_history]

    def equal(kept, plain, told_of=told):
        assert told_of(kept) == told_of(plain), (told_of(kept), told_of(plain))
        same = [torch.equal(*pair) for pair in zip(kept.model.parameters(), plain.model.parameters(), strict=True)]
        assert all(same)
        return len(told_of(kept))

    kept = trainer(True, "kept", save_strategy="steps" if sys.argv[1] == "dies" else "no", save_steps=5)
    flk_transformers.adopt(kept, save_every=1)
    kept.train()
    if sys.argv[1] == "dies":
        of_steps = {("train", "FIRST_STEP"), ("train", "TRAINING")}
        assert phases == {*of_steps, ("evaluate", "EVALUATING"), ("save", "SAVING")}, phases
        plain = trainer(False, "plain", save_strategy="steps", save_steps=5)
        plain.train()
        print("equal", equal(kept, plain))
    if "theirs" in sys.argv:
        longer = trainer(False, "plain", 3, save_strategy="steps", save_steps=5)
        longer.train(resume_from_checkpoint=True)
        theirs = trainer(True, "theirs", 3, save_strategy="no")
        flk_transformers.adopt(theirs, checkpoint="first")
        theirs.train(resume_from_checkpoint="plain/checkpoint-15")
        assert begun[-1] == 15
        equal(theirs, longer, lambda trainer: told(trainer)[:-1])  # the mean of the whole training is of this process
        if RANK == 0:
            shutil.copytree("first", "again")  # each training of a process has a place of its own
        torch.distributed.barrier()
        again = trainer(True, "again", max_steps=19, save_strategy="no")
        flk_transformers.adopt(again, checkpoint="again")
        again.train(resume_from_checkpoint="plain/checkpoint-5")
        assert begun[-1] == 18, "flk's checkpoint comes before the trainer's own"
        print("went on from theirs")
"""

# Two epochs of six steps of two micro-batches, with dropout, a shuffled loader and two validations in each epoch.
LIGHTNING: Final = """
    import os, pathlib, shutil, signal, sys, time, warnings, lightning, torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from flk_hosts.lightning import Flk
    from flk_runtime.shared.progress import Phase, own_page

    warnings.simplefilter("ignore")
    ATTEMPT, RANK = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    DIES = {0: 4, 1: 7} if sys.argv[1] == "dies" else {}
    phases = set()

    class Model(lightning.LightningModule):
        def __init__(self, faults):
            super().__init__()
            self.network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
            self.faults, self.seen = faults, {}
        def on_train_start(self):
            self.began = self.trainer.global_step, [each.clone() for each in self.network.state_dict().values()]
        def training_step(self, batch, index):
            phases.add(("train", Phase(own_page().phase).name))
            x, number = batch
            loss = (self.network(x) - x.sum(1, keepdim=True)).square().mean()
            self.seen[f"{self.trainer.current_epoch} {index}"] = (number.tolist(), loss.item())
            if self.faults:
                self.log("step", float(self.trainer.current_epoch))  # which Lightning takes for the axis of curves
            return loss
        def validation_step(self, batch, index):
            phases.add(("validate", Phase(own_page().phase).name))
            torch.rand(1)
            self.log("validated", self.network(batch[0]).mean(), sync_dist=True)
        def on_train_batch_end(self, outputs, batch, index):
            step = self.trainer.global_step
            if self.faults and DIES.get(ATTEMPT) == step and RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "waits":
                pathlib.Path(f"step.{ATTEMPT}.{RANK}").write_text(str(step))
                while step == 3 and not pathlib.Path("go").exists():
                    time.sleep(0.01)
        def on_save_checkpoint(self, checkpoint):
            phases.add(("save", Phase(own_page().phase).name))
            checkpoint["seen"] = self.seen
        def on_load_checkpoint(self, checkpoint):
            self.seen = checkpoint["seen"]
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]

    def trained(callbacks, distributed_sampler, folder, epochs=2, begin=None, **more):
        lightning.seed_everything(0, verbose=False)
        data = TensorDataset(torch.randn(48, 4), torch.arange(48))
        model = Model(bool(callbacks))
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=epochs, accumulate_grad_batches=2,
            val_check_interval=6, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*callbacks, ModelCheckpoint(folder, "{step}", "validated", save_last=True, save_top_k=-1)],
            log_every_n_steps=3, use_distributed_sampler=distributed_sampler, **more,
        )
        batch = 2 if distributed_sampler else 4
        trainer.fit(model, DataLoader(data, batch, shuffle=True), DataLoader(data, 24), ckpt_path=begin)
        return trainer, model

    kind = sys.argv[2] == "distributed"
    trainer, model = trained([Flk(save_every=1)], kind, "checkpoints")
    if sys.argv[1] == "dies":
        of_steps = {("train", "FIRST_STEP"), ("train", "TRAINING")}
        assert phases == {*of_steps, ("validate", "EVALUATING"), ("save", "SAVING")}, phases
        plain_trainer, plain = trained([], kind, "checkpoints of the other")
        assert model.seen == plain.seen, (model.seen, plain.seen)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
        best = [each.checkpoint_callback.best_model_score for each in (trainer, plain_trainer)]
        assert best[0] == best[1], best
        print("equal", len(model.seen))
    if "theirs" in sys.argv:
        trained([], kind, "longer", 3)
        flk = Flk(checkpoint="stored", log_every=0)
        _, theirs = trained([flk], kind, "theirs", 3, "longer/step=15.ckpt")
        step, weights = theirs.began
        expected = torch.load("longer/step=15.ckpt", weights_only=False)["state_dict"].values()
        assert step == 15 and all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
        assert flk.loop.steps == 18
        if RANK == 0:
            shutil.copytree("stored", "stored again")  # each training of a process has a place of its own
        torch.distributed.barrier()
        _, again = trained([Flk(checkpoint="stored again", log_every=0)], kind, "again", 4, "longer/step=3.ckpt")
        assert again.began[0] == 18, "flk's checkpoint comes before the trainer's own"
        print("went on from theirs")
"""

# Three epochs of three steps of two micro-batches, with dropout, an evaluation after each, and samples that are noisy.
ACCELERATE: Final = """
    import os, pathlib, signal, sys, time, torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    from flk_hosts.accelerate import adopt

    ATTEMPT, RANK = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    DIES = {0: 2, 1: 4} if sys.argv[1] == "dies" else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    class Noisy(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, index):
            return torch.full((4,), index / 24) + torch.rand(4), index

    class Average:
        value = 0.0
        def state_dict(self):
            return {"value": self.value}
        def load_state_dict(self, state):
            self.value = state["value"]

    def trained(kept):
        set_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader, evaluation = DataLoader(Noisy(), 2, shuffle=True), DataLoader(Noisy(), 6)
        model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
            model, optimizer, loader, evaluation, scheduler
        )
        average, progress = Average(), {"seen": []}
        accelerator.register_for_checkpointing(average)
        loop = adopt(accelerator, save_every=1, log_every=3, progress=progress) if kept else None
        for epoch in range(loader.iteration, 3):
            model.train()
            for batch, numbers in loader:
                with accelerator.accumulate(model):
                    loss = (model(batch) - 1).square().mean()
                    accelerator.backward(loss)
                    optimizer.step(), scheduler.step(), optimizer.zero_grad()
                average.value += accelerator.reduce(loss.detach(), "mean").item()
                progress["seen"].append([epoch, accelerator.gather(numbers).tolist(), average.value])
                if accelerator.sync_gradients and kept:
                    if DIES.get(ATTEMPT) == loop.steps + 1 and RANK == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    loop.step(loss=loss, samples=8)
                    pathlib.Path(f"step.{ATTEMPT}.{RANK}").write_text(str(loop.steps))
                    while sys.argv[1] == "waits" and loop.steps == 2 and not pathlib.Path("go").exists():
                        time.sleep(0.01)
            model.eval()
            total = sum(model(batch).mean().detach() for batch, _ in evaluation)
            last = accelerator.reduce(loss.detach(), "mean").item()  # of the loop over the epoch
            progress["seen"].append([epoch, accelerator.reduce(total).item(), last])
            if kept and "tail" in sys.argv and (ATTEMPT, RANK, epoch) == (2, 1, 1):
                os.kill(os.getpid(), 9)
        if kept:
            loop.close()
        accelerator._dataloaders.clear(), accelerator._models.clear(), accelerator._custom_objects.clear()
        accelerator._optimizers.clear(), accelerator._schedulers.clear()
        return progress["seen"], model

    seen, model = trained(True)
    if sys.argv[1] == "dies":
        plain_seen, plain = trained(False)
        assert seen == plain_seen, (seen, plain_seen)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
        print("equal", len(seen))
"""
