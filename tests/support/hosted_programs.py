"""Programs of other packages, several trainings in one process: a rank dies in each, at a step or after its end.

Each training has a place of its own for checkpoints. In the attempt whose number is its own, rank 1 dies in it. In the
last attempt all are trained again without flk, and ``equal`` is printed with their number if both are the same.
"""

from __future__ import annotations

from typing import Final

_BEGIN: Final = """
    import numpy, os, signal, sys, warnings, torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    warnings.simplefilter("ignore")
    ATTEMPT, RANK = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    END = 1_000  # a step that no training makes: the rank dies when train() has returned

    def die(number, step=END):
        if (ATTEMPT, RANK, STEPS[number]) == (number, 1, step):
            os.kill(os.getpid(), signal.SIGKILL)

    class Lines(Dataset):
        def __init__(self, lengths=6):
            self.lengths = lengths
        def __len__(self):
            return 24
        def __getitem__(self, index):
            if index >= 24:
                raise IndexError
            return {"input_ids": torch.arange(index, index + 3 + index % self.lengths) % 16}

    class Stream(IterableDataset):
        def __iter__(self):
            return (Lines(1)[index] for index in range(20))
"""

# The programs whose numbers are arguments: a collator that draws random numbers, samplers that draw the order, streams
# that are read several times, and ends that the number of steps does not tell.
TRANSFORMERS: Final = (
    _BEGIN
    + """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    from flk_hosts import transformers as flk_transformers

    class Dies(TrainerCallback):
        def __init__(self, number):
            self.number = number
        def on_step_end(self, args, state, control, **_):
            die(self.number, state.global_step)
        def on_log(self, args, state, control, **_):  # what JSON does not have
            state.log_history[-1] |= {"norm": torch.ones((), requires_grad=True) * 2, "share": numpy.float32(0.5)}

    class ShortEpochs(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_epoch_stop = state.global_step % 4 == 0

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 8

    def whole(samples):
        return {"input_ids": (words := torch.stack([each["input_ids"] for each in samples])), "labels": words}

    def noisy(samples):
        size = max(len(each["input_ids"]) for each in samples)
        words = torch.stack([F.pad(each["input_ids"], (0, size - len(each["input_ids"]))) for each in samples])
        labels = words.masked_fill(torch.rand(words.shape) < 0.3, -100)
        labels[:, 1:3] = words[:, 1:3]
        return {"input_ids": words, "labels": labels}

    own = {"dispatch_batches": False}
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    # The data, the step after which rank 1 dies, callbacks, and options: six steps are an epoch, and five a stream.
    PROGRAMS = [
        (Lines(), 8, [], {"num_train_epochs": 2, "train_sampling_strategy": "group_by_length"}),
        (Lines(), 9, [], {"num_train_epochs": 2, "accelerator_config": {"use_seedable_sampler": False}}),
        (Lines(), 9, [], {"num_train_epochs": 2}),
        (Lines(1), 8, [], {"num_train_epochs": 2, "train_sampling_strategy": "group_by_length", **workers}),
        (Stream(), 8, [], {"max_steps": 11, "accelerator_config": own}),
        (Stream(), 6, [], {"max_steps": 11, "accelerator_config": own}),
        (Lines(), 6, [ShortEpochs], {"num_train_epochs": 2}),
        (Lines(), END, [], {"max_steps": 4}),
        (Lines(), END, [Stops], {"num_train_epochs": 2}),
    ]
    PROGRAMS = [PROGRAMS[int(number)] for number in sys.argv[1:]]
    STEPS = [each[1] for each in PROGRAMS]

    def trainer(number, kept):
        data, _, callbacks, options = PROGRAMS[number]
        set_seed(3)
        config = LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.3,
        )
        arguments = TrainingArguments(
            output_dir="out", per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=2, report_to="none",
            save_strategy="no", disable_tqdm=True, use_cpu=True, **options,
        )
        return Trainer(
            model=LlamaForCausalLM(config), args=arguments, train_dataset=data,
            data_collator=whole if arguments.dataloader_num_workers else noisy,
            callbacks=[each() for each in callbacks] + ([Dies(number)] if kept else []),
        )

    def told(trainer):
        names = ("step", "epoch", "loss", "grad_norm", "learning_rate", "train_loss", "total_flos")
        return [{name: each[name] for name in names if name in each} for each in trainer.state.log_history]

    trained = []
    for number in range(len(PROGRAMS)):
        kept = trainer(number, True)
        flk_transformers.adopt(kept, checkpoint=f"stored/{number}", save_every=1)
        kept.train()
        die(number)
        trained.append(kept)
    for number, kept in enumerate(trained):
        plain = trainer(number, False)
        plain.train()
        assert told(kept) == told(plain), (number, told(kept), told(plain))
        same = [torch.equal(*pair) for pair in zip(kept.model.parameters(), plain.model.parameters(), strict=True)]
        assert all(same), number
    print("equal", len(trained))
"""
)

# The programs whose numbers are arguments: averages that a callback keeps in checkpoints, steps by hand of two
# optimizers, a learning rate that is looked for, streams, ends that the number of steps does not tell, schedulers that
# ask for the number of steps or follow a metric.
LIGHTNING: Final = (
    _BEGIN
    + """
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, GradientAccumulationScheduler
    from lightning.pytorch.tuner import Tuner
    from torch import nn

    from flk_hosts.lightning import Flk

    class Model(lightning.LightningModule):
        def __init__(self, number, kept):
            super().__init__()
            self.number, self.kept, self.lr, self.seen = number, kept, 1e-2, []
            self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        def training_step(self, batch, index):
            x = batch + 0.1 * torch.rand_like(batch)
            return (self.network(x) - x.sum(1, keepdim=True)).square().mean()
        def validation_step(self, batch, index):
            value = self.network(batch).mean()
            self.seen.append(value.item())
            self.log("validated", value, sync_dist=True)
        def on_train_batch_end(self, outputs, batch, index):
            if self.kept and not hasattr(self, "tuned"):
                die(self.number, self.trainer.global_step)
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)
        def on_save_checkpoint(self, checkpoint):
            assert checkpoint["state_dict"]["network.0.weight"].shape == (8, 4)
            checkpoint["seen"] = self.seen
        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["state_dict"]["network.0.weight"].shape == (8, 4)
            self.seen = checkpoint["seen"]

    class ByHand(Model):
        def __init__(self, number, kept):
            super().__init__(number, kept)
            self.automatic_optimization = False
        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                loss = super().training_step(batch, index)
                optimizer.zero_grad(), self.manual_backward(loss), optimizer.step()
            return loss
        def configure_optimizers(self):
            return [
                torch.optim.AdamW(self.network[0].parameters(), lr=1e-2),
                torch.optim.SGD(self.network[2].parameters(), lr=1e-2, momentum=0.9),
            ]

    class Batches(IterableDataset):
        def __iter__(self):
            return iter(torch.randn(5, 2, 4))

    class Drawn(IterableDataset):
        def __iter__(self):
            return (torch.randn(2, 4) for _ in range(5))

    class Planned(Model):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]

    class Plateau(Model):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validated"}}

    def average():
        return EMAWeightAveraging(decay=0.5)

    def stopping():
        return EarlyStopping("validated", patience=1, min_delta=1e6)

    def accumulation():
        return GradientAccumulationScheduler({0: 2, 1: 3})

    # The model, the step after which rank 1 dies, callbacks, and options: six steps are an epoch.
    PROGRAMS = [
        (Model, 8, [average], {"max_epochs": 2, "val_check_interval": 3}),
        (Model, END, [average], {"max_steps": 4, "max_epochs": 2, "val_check_interval": 3}),
        (ByHand, 16, [], {"max_epochs": 2}),
        (Model, 9, [], {"max_epochs": 2}),
        (Model, END, [stopping], {"max_epochs": 6}),
        (Model, 7, [], {"max_epochs": 2}),
        (Model, 5, [accumulation], {"max_epochs": 3}),
        (Planned, 8, [], {"max_epochs": 2}),
        (Plateau, 14, [], {"max_epochs": 4}),
        (Model, 8, [], {"max_epochs": 2}),
    ]
    TUNED, STREAMS = PROGRAMS[3], {id(PROGRAMS[5]): Batches, id(PROGRAMS[9]): Drawn}
    PROGRAMS = [PROGRAMS[int(number)] for number in sys.argv[1:]]
    STEPS = [each[1] for each in PROGRAMS]

    def trained(number, flk):
        kind, _, callbacks, options = program = PROGRAMS[number]
        lightning.seed_everything(0, verbose=False)
        data = torch.randn(24, 4)
        model = kind(number, bool(flk))
        stream = STREAMS.get(id(program))
        loader = DataLoader(stream(), batch_size=None) if stream else DataLoader(data, 2, shuffle=True)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=program is TUNED, default_root_dir=f"lightning/{number}",
            callbacks=[*flk, *(each() for each in callbacks)], num_sanity_val_steps=0, **options,
        )
        if program is TUNED:
            model.tuned = True
            Tuner(trainer).lr_find(model, loader, num_training=4)
            del model.tuned
        trainer.fit(model, loader, DataLoader(data, 12))
        return model

    kept = []
    for number in range(len(PROGRAMS)):
        kept.append(trained(number, [Flk(checkpoint=f"stored/{number}", save_every=1)]))
        die(number)
    for number, model in enumerate(kept):
        plain = trained(number, [])
        assert model.seen == plain.seen, (number, model.seen, plain.seen)
        same = [torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True)]
        assert all(same), number
    print("equal", len(kept))
"""
)

# Streams, whose last batches are completed, and two models with optimizers in turn.
ACCELERATE: Final = (
    _BEGIN
    + """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed
    from torch import nn

    import flk_runtime as flk
    from flk_hosts.accelerate import adopt

    class Noisy(IterableDataset):
        def __iter__(self):
            return (torch.full((4,), index / 22) + torch.rand(4) for index in range(22))

    # The data, the step after which rank 1 dies, the models, and micro-batches: six steps are an epoch of the streams.
    PROGRAMS = [(Noisy(), 8, 1, 1), (Noisy(), 7, 1, 1), (torch.arange(96.0).view(24, 4) / 96, 5, 2, 2)]
    PROGRAMS += [(torch.arange(96.0).view(24, 4) / 96, 5, 1, 1)]  # which leaves its epochs after four steps
    STEPS = [each[1] for each in PROGRAMS]

    def trained(number, kept):
        data, _, count, pieces = PROGRAMS[number]
        own = DataLoaderConfiguration(dispatch_batches=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=pieces, dataloader_config=own)
        set_seed(5)
        models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 4)) for _ in range(count)]
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
        loader = DataLoader(data, 2, shuffle=not isinstance(data, IterableDataset))
        loader, *prepared = accelerator.prepare(loader, *models, *optimizers, *schedulers)
        models, optimizers, schedulers = (prepared[begin * count:][:count] for begin in range(3))
        progress = {"seen": [], "epochs": 0}
        place = {"checkpoint": f"stored/{number}", "save_every": 1, "log_every": 0}
        loop = adopt(accelerator, **place, progress=flk.per_rank(progress)) if kept else None
        for epoch in range(progress["epochs"] if number == 3 else loader.iteration, 2):
            for batch in loader:
                with accelerator.accumulate(*models):
                    output = batch
                    for each in models:
                        output = each(output)
                    loss = (output - 1).square().mean()
                    accelerator.backward(loss)
                    for each in optimizers:
                        each.step(), each.zero_grad()
                progress["seen"].append([epoch, batch.tolist(), loss.item()])
                if accelerator.sync_gradients and kept:
                    if number == 3:
                        loop.manager.wait()  # so that it goes on where an epoch was left
                    die(number, loop.steps + 1)
                    loop.step(loss=loss)
                if number == 3 and len(progress["seen"]) % 4 == 0:
                    break
            progress["epochs"] = epoch + 1
            for each in schedulers:
                each.step()
        if kept:
            loop.close()
        accelerator.free_memory()
        return progress["seen"], models

    kept = [trained(number, True) for number in range(len(PROGRAMS))]
    for number, (seen, models) in enumerate(kept):
        plain_seen, plain = trained(number, False)
        differing = [pair for pair in zip(seen, plain_seen, strict=True) if pair[0] != pair[1]]
        assert not differing, (number, differing)
        for pair in zip(models, plain, strict=True):
            assert all(torch.equal(*both) for both in zip(*(each.parameters() for each in pair), strict=True)), number
    print("equal", len(kept))
    again, _ = trained(0, True)  # in the place of the first one, and not from its state
    print("again", again == kept[0][0])
"""
)
