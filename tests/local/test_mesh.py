"""parallelize with mesh=, parallelize=, tp= and tp_plan=: the script's own parallelism beside FSDP2."""

from __future__ import annotations

import json
import re
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import told

# A transformer whose heads have a norm of their own, and whose sequences may be split over a group (all-to-all).
MODEL = """
    import json, os, warnings, torch, torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    import flk_runtime as flk

    dist.init_process_group("gloo")

    class Exchange(torch.autograd.Function):
        # (batch, part of the sequence, heads, size) to (batch, sequence, part of the heads, size), and back.
        @staticmethod
        def forward(ctx, x, group, back):
            ctx.group, ctx.back = group, back
            ranks = dist.get_world_size(group)
            parts = [each.contiguous() for each in x.chunk(ranks, 1 if back else 2)]
            got = [torch.empty_like(each) for each in parts]
            own = dist.get_rank(group)
            for root in range(ranks):  # gloo has no all_to_all of lists
                every = [torch.empty_like(parts[0]) for _ in range(ranks)] if own == root else None
                dist.gather(parts[root], every, group_dst=root, group=group)
                got = every if own == root else got
            return torch.cat(got, 2 if back else 1)
        @staticmethod
        def backward(ctx, gradient):
            return Exchange.apply(gradient, ctx.group, not ctx.back), None, None

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head_norm, self.group = nn.LayerNorm(16), nn.LayerNorm(4), None
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        def forward(self, x):
            y = self.norm(x)
            q, k, v = (each(y).unflatten(-1, (-1, 4)) for each in (self.q, self.k, self.v))
            q, k = self.head_norm(q), self.head_norm(k)
            if self.group:
                q, k, v = (Exchange.apply(each, self.group, False) for each in (q, k, v))
            y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
            y = y.transpose(1, 2)
            if self.group:
                y = Exchange.apply(y, self.group, True)
            x = x + self.o(y.flatten(2))
            return x + self.down(F.gelu(self.up(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
            self.layers = nn.ModuleList(Block() for _ in range(2))
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    PLAN = {
        "layers.*.[qkv]": "colwise", "layers.*.head_norm": "replicated_with_grad_allreduce", "layers.*.o": "rowwise",
        "layers.*.up": "colwise", "layers.*.down": "rowwise",
        "embed": "embedding_rowwise", "head": "colwise_gather_output",
    }

    def split(model, mesh):
        from flk_runtime.parallel.tensor_parallel import by_plan
        if "tp" in mesh.mesh_dim_names:
            by_plan(model, PLAN)(model, mesh["tp"])
        if "cp" in mesh.mesh_dim_names and mesh["cp"].size() > 1:
            for layer in model.layers:
                layer.group = mesh["cp"].get_group()
        split.mesh = mesh

    source = torch.Generator().manual_seed(7)
    data = [(torch.randint(0, 11, (8,), generator=source), torch.randint(0, 11, (8,), generator=source), n)
            for n in range(32)]

    def build():
        torch.manual_seed(3)
        model = Model()
        for each in model.parameters():  # so that gradients of norms and biases matter
            each.data.add_(torch.randn_like(each) * 0.05)
        return model

    def sgd(model):  # its few operations are soon known to DTensor
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def one_process(steps, max_norm=0.1):
        model = build()
        optimizer = sgd(model)
        losses, norms = [], []
        for step in range(steps):
            x, y, _ = map(torch.stack, zip(*[(a, b, torch.tensor(n)) for a, b, n in data[step * 8:step * 8 + 8]]))
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad(), loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            losses.append(loss.item())
        return losses, norms, model.state_dict()

    def train(name, strategy, until, options):
        with flk.init(strategy=strategy, checkpoint=os.environ["FOLDER"] + name, seed=1, log_every=0) as run:
            model = build()
            if options.pop("meta", False):
                values, model = model.state_dict(), model.to("meta")
                def init(model):
                    for key, each in model.named_parameters():
                        each.data.copy_(values[key])
                options["init"] = init
            model, optimizer = run.parallelize(model, sgd(model), **options)
            sizes = options.get("mesh") or {"tp": options.get("tp", 1)}
            parts = run.world_size
            for size in sizes.values():
                parts //= size
            cp = sizes.get("cp", 1)
            place = split.mesh["cp"].get_local_rank() if cp > 1 else 0
            losses, norms = [], []
            for x, y, n in run.loader(data, 8 // parts, shuffle=False).steps(until):
                x, y = (each.chunk(cp, 1)[place] for each in (x, y))
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                optimizer.zero_grad(), run.backward(loss)
                norms.append(float(run.clip_grad_norm(0.1)))
                optimizer.step()
                run.step()
                losses.append(run.mean(loss.item(), len(x)))
            run.export(os.environ["FOLDER"] + f"{name}-{until}.safetensors")
            random = [None] * run.world_size
            dist.all_gather_object(random, f"{float(torch.rand(()))} {list(flk.shard(range(4)))}")
            return losses, norms, random
"""

# Two steps, and a third one that resumes with another mesh, and with blocks that are compiled.
TRAINS = (
    MODEL
    + """
    from safetensors.torch import load_file

    warnings.simplefilter("ignore")  # of the compiler's own looking
    COMPILER = json.loads(os.environ["COMPILER"])
    TP, CP, BOTH = ({"mesh": mesh, "parallelize": split} for mesh in ({"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}))
    HYBRID = TP | {"shard_size": 1, "compile": COMPILER}
    found = {"expected": one_process(3)[:2]}
    exported = {steps: one_process(steps)[2] for steps in (2, 3)}
    for name, *parts in (
        ("tp", ("full_shard", TP | {"meta": True, "recompute": True}), ("hybrid_shard", HYBRID)),
        ("cp", ("full_shard", CP), ("full_shard", {"tp": 4, "tp_plan": PLAN, "compile": COMPILER})),
        ("both", ("shard_grad_op", BOTH | {"compile": COMPILER}), ("full_shard", {})),
    ):
        (losses, norms, random), ended = (
            train(name, strategy, until, dict(options)) for until, (strategy, options) in zip((2, 3), parts)
        )
        found[name] = losses + ended[0], norms + ended[1]
        print("=", json.dumps(["random " + name, random]))
        for steps in (2, 3) if dist.get_rank() == 0 else ():
            for key, value in load_file(os.environ["FOLDER"] + f"{name}-{steps}.safetensors").items():
                torch.testing.assert_close(value, exported[steps][key], rtol=0, atol=2e-5)
    print("=", json.dumps(["found", found]))
    dist.barrier()
"""
)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param(True, marks=pytest.mark.soak, id="inductor")])
def test_each_mesh_trains_as_one_process_also_after_another_mesh(
    fork_server: ForkServerContext, tmp_path: Path, compiler: str | bool
) -> None:
    # One thread: inductor's pool of compiler processes does not start in a forked process.
    variables = {"FOLDER": f"{tmp_path}/", "COMPILER": json.dumps(compiler), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ranks = Ranks(fork_server, tmp_path, patience=240)  # the C++ compiler takes long on a busy machine
    seen = told(ranks(TRAINS, 4, variables)[0])
    losses, norms = seen["found"].pop("expected")
    assert len(set(losses)) == 3
    assert min(norms) > 0.1  # so that clipping changes each step
    assert len(seen["found"]) == 3
    for name, (own_losses, own_norms) in seen["found"].items():
        assert own_losses == pytest.approx(losses, abs=1e-6), name
        assert own_norms == pytest.approx(norms, rel=2e-5), name
    first, second, third, fourth = seen["random tp"]
    assert first == second, "ranks with the same data draw the same random numbers"
    assert third == fourth != first
    assert len(set(seen["random cp"])) == 4
    for name in ("random tp", "random cp"):
        assert [each.partition(" ")[2] for each in seen[name]] == ["[0, 1]", "[0, 1]", "[2, 3]", "[2, 3]"]


# Two stages of a pipeline on each rank; then another mesh, then one stage on each rank, and then two again.
PIPELINE = (
    MODEL
    + """
    import copy, warnings
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.distributed.pipelining import ScheduleInterleavedZeroBubble
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # torch says so for a compiled block in a zero-bubble schedule

    STAGES = ("embed", "layers.0", "layers.1", "head")

    def part(model, number):
        stage = copy.deepcopy(model)
        for name in STAGES[:number] + STAGES[number + 1:]:
            stage.set_submodule(name, nn.Identity())
        return stage

    def interleaved(model, mesh):
        split(model, mesh)
        rank = mesh["pp"].get_local_rank()
        return [part(model, rank), part(model, rank + 2)]

    def stages(model, mesh):
        split(model, mesh)
        first = mesh["pp"].get_local_rank() == 0
        model.layers[1 if first else 0] = nn.Identity()
        setattr(model, "head" if first else "embed", nn.Identity())

    def schedule_of(model, group, zero=False):
        loss_of = lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten())
        rank, device = dist.get_rank(group), torch.device("cpu")
        if isinstance(model, Model):
            return ScheduleGPipe(PipelineStage(model, rank, 2, device, group=group), 2, loss_fn=loss_of)
        stages = [PipelineStage(each, rank + 2 * n, 4, device, group=group) for n, each in enumerate(model)]
        if zero:  # gradients of weights apart from those of inputs
            return ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss_of)
        return ScheduleInterleaved1F1B(stages, 2, loss_fn=loss_of)

    def run_schedule(run, schedule, x, y, first):
        losses = []
        schedule.step(x) if first else schedule.step(target=y, losses=losses)
        return lambda: run.mean(sum(each.item() for each in losses) / max(1, len(losses)), 0.0 if first else 1.0)

    def train_stages(name, function, until, sizes, zero=False, **options):
        with flk.init(strategy="full_shard", checkpoint=os.environ["FOLDER"] + name, seed=1, log_every=0) as run:
            model = build()
            mesh = {"pp": 2, **sizes}
            model, optimizer = run.parallelize(model, sgd(model), mesh=mesh, parallelize=function, **options)
            group = split.mesh["pp"].get_group()
            first, parts = dist.get_rank(group) == 0, run.world_size // 2 // sizes.get("tp", 1)
            schedule, losses, norms = schedule_of(model, group, zero), [], []
            for x, y, n in run.loader(data, 8 // parts, shuffle=False).steps(until):
                optimizer.zero_grad()
                loss = run_schedule(run, schedule, x, y, first)
                norms.append(float(run.clip_grad_norm(0.1)))
                optimizer.step()
                run.step()
                losses.append(loss())
            run.export(os.environ["FOLDER"] + f"{name}-{until}.safetensors")
            optimizer.zero_grad()
            gradients = []
            for _ in range(2):  # schedules whose gradients add up; torch divides the sum by the number of parts again
                run_schedule(run, schedule, x, y, first)
                gradients.append([each.grad.to_local().clone() for each in model.parameters()])
            for once, twice in zip(*gradients, strict=True):
                torch.testing.assert_close(once + once / schedule._n_microbatches, twice)
            optimizer.zero_grad()
            shards = [each.detach().to_local() for each in model.parameters()]
            before = [each.clone() for each in shards]
            for place, part in enumerate([model] if isinstance(model, Model) else model):
                part(x if first and not place else torch.zeros(*x.shape, 16))
                for each in part.parameters():
                    each.data.mul_(0.5)
            try:
                optimizer.step()
            except flk.SetupError as error:
                assert "after a forward pass with gradients, where the change is lost" in str(error), error
            else:
                torch.testing.assert_close([2 * each for each in shards], before)
            return losses, norms, None

    def adopt_stages(name, until):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        model = interleaved(build(), mesh)
        warnings.simplefilter("ignore")  # torch's, about the views that a stage returns
        for each in model:
            for block in [layer for layer in each.layers if isinstance(layer, Block)]:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(each, mesh=mesh["dp"])
        optimizer = sgd(nn.ModuleList(model))
        schedule, losses = schedule_of(model, mesh["pp"].get_group(), until == 4), []
        with flk.adopt(checkpoint=os.environ["FOLDER"] + name, log_every=0, model=model, optimizer=optimizer) as loop:
            for x, y, n in loop.loader(data, 4, mesh=mesh["dp"], shuffle=False).steps(until):
                optimizer.zero_grad()
                loss = run_schedule(loop, schedule, x, y, mesh["pp"].get_local_rank() == 0)
                optimizer.step()
                loop.step()
                losses.append(loss())
        return losses

    warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler's own looking
    more = json.loads(os.environ["SIZES"])
    found = {"expected": one_process(4)[:2]}
    parts = [
        train_stages("pp", interleaved, 1, more, compile="aot_eager"),
        train("pp", "full_shard", 2, {"tp": 2, "tp_plan": PLAN}),
        train_stages("pp", stages, 3, more, compile="aot_eager"),
        train_stages("pp", interleaved, 4, more, zero=True, compile="aot_eager"),
    ]
    found["pp"] = sum((each[0] for each in parts), []), sum((each[1] for each in parts), [])
    print("=", json.dumps(["found", found]))
    if not more:
        adopted = [adopt_stages("adopted", until) for until in (2, 4)]
        print("=", json.dumps(["adopted", [one_process(4, 1e9)[0], sum(adopted, [])]]))
    from safetensors.torch import load_file
    for steps in (1, 2, 3, 4) if dist.get_rank() == 0 else ():
        expected = one_process(steps)[2]
        exported = load_file(os.environ["FOLDER"] + f"pp-{steps}.safetensors")
        assert exported.keys() == expected.keys()
        for key, value in exported.items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=2e-5)
    dist.barrier()
"""
)


@pytest.mark.parametrize("sizes", [{}, pytest.param({"tp": 2}, marks=pytest.mark.soak)], ids=["2x2", "2x2x2"])
def test_stages_of_a_pipeline_train_as_one_process_also_after_another_mesh(
    ranks: Ranks, tmp_path: Path, sizes: dict[str, int]
) -> None:
    variables = {"FOLDER": f"{tmp_path}/", "SIZES": json.dumps(sizes)}
    seen = told(ranks(PIPELINE, 8 if sizes else 4, variables)[0])
    losses, norms = seen["found"].pop("expected")
    own_losses, own_norms = seen["found"]["pp"]
    assert len(set(losses)) == 4
    assert own_losses == pytest.approx(losses, abs=1e-6)
    assert own_norms == pytest.approx(norms, rel=2e-5)
    for expected, found in [seen["adopted"]] if not sizes else []:
        assert found == pytest.approx(expected, abs=1e-6)


# Experts that the ranks of a group share out. Each rank has the same tokens, and adds what its experts make of them.
EXPERTS = (
    MODEL
    + """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(4, *size) * 0.2) for size in ((16, 8), (8, 16)))
            self.mesh, self.sums = None, True
        def forward(self, x, gates):
            up, down = self.up, self.down
            if self.mesh:
                placements = [Partial() if self.sums else Replicate()]  # of gradients
                x, gates = (DTensor.from_local(each, self.mesh, [Replicate()]).to_local(grad_placements=placements)
                            for each in (x, gates))
                up, down = up.to_local(), down.to_local()
                gates = gates.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]
            y = torch.einsum("bseh,ehw,bse->bsw", F.gelu(torch.einsum("bsw,ewh->bseh", x, up)), down, gates)
            return DTensor.from_local(y, self.mesh, [Partial()]).full_tensor() if self.mesh else y

    class Routed(Block):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(16, 4, bias=False), Experts()
        def forward(self, x):
            x = super().forward(x)
            gates = self.router(x).softmax(-1)
            return x + self.experts(x, gates * (gates >= gates.topk(2).values[..., -1:]))

    def build():
        torch.manual_seed(3)
        model = Model()
        model.layers = nn.ModuleList(Routed() for _ in range(2))
        return model

    def share_out(model, mesh, sums=True):
        for layer in model.layers:
            experts, experts_mesh = layer.experts, mesh["ep"]
            experts.mesh, experts.sums = experts_mesh, sums
            for name, each in list(experts.named_parameters()):
                shard = distribute_tensor(each.data, experts_mesh, [Shard(0)])
                setattr(experts, name, nn.Parameter(shard))
"""
)
TRAINS_EXPERTS = (
    EXPERTS
    + """
    found = {"expected": one_process(4)[:2], "losses": [], "norms": []}
    warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler's own looking
    parts = (2, {}), (4, {"recompute": True}), (2, {"compile": "aot_eager"}), (0, {})
    for until, (size, more) in enumerate(parts, 1):
        options = {"mesh": {"ep": size}, "parallelize": share_out} if size else {}
        losses, norms, _ = train("ep", "full_shard", until, {**options, **more})
        found["losses"] += losses
        found["norms"] += norms
    print("=", json.dumps(["found", found]))
    with flk.init(strategy="full_shard", log_every=0) as run:
        model = build()
        options = {"mesh": {"ep": 2}, "parallelize": lambda model, mesh: share_out(model, mesh, sums=False)}
        model, optimizer = run.parallelize(model, sgd(model), **options)
        model(data[0][0][None]).square().mean().backward()
        try:
            optimizer.step()
        except flk.SetupError as error:
            print("=", json.dumps(["refused", str(error)]))
    dist.barrier()
"""
)


def test_experts_on_different_ranks_train_as_in_one_process_also_after_another_mesh(
    ranks: Ranks, tmp_path: Path
) -> None:
    seen = told(ranks(TRAINS_EXPERTS, 4, {"FOLDER": f"{tmp_path}/"})[0])
    losses, norms = seen["found"]["expected"]
    assert len(set(losses)) == 4
    assert seen["found"]["losses"] == pytest.approx(losses, abs=1e-6)
    assert seen["found"]["norms"] == pytest.approx(norms, rel=2e-5)
    assert re.match(
        r"the gradient of '(embed|layers\.0)\..*' differs between ranks that hold the same", seen["refused"]
    )


HUGGING_FACE = """
    import copy, os, torch, warnings, torch.distributed as dist
    from torch import nn
    import flk_runtime as flk
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    dist.init_process_group("gloo")
    x = torch.randint(0, 32, (2, 2, 8), generator=torch.Generator().manual_seed(5))
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
                 intermediate_size=32, vocab_size=32, bos_token_id=1, eos_token_id=2)
    for kind, config, tied in ((LlamaForCausalLM, LlamaConfig, True), (Qwen3ForCausalLM, Qwen3Config, False)):
        torch.manual_seed(3)
        plain = kind(config(tie_word_embeddings=tied, **sizes))
        for each in plain.parameters():
            each.data.add_(torch.randn_like(each) * 0.05)
        with flk.init(strategy="full_shard", log_every=0) as run:
            model = kind(config(tie_word_embeddings=tied, **sizes))
            model.load_state_dict(plain.state_dict())
            optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
            flk.replicated(optimizers[0])
            model, _ = run.parallelize(model, optimizers[1], tp=2)
            for step in range(2):
                losses = []
                for each, optimizer in zip((plain, model), optimizers):
                    losses.append(each(input_ids=x[step], labels=x[step]).loss)
                    optimizer.zero_grad(), losses[-1].backward(), optimizer.step()
                torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=2e-6)
                run.step()
        print("same", kind.__name__, tied)

    # Blocks that are compiled, beside FSDP2.
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler's own looking
    torch.manual_seed(3)
    plain = nn.Sequential(Block(), Block())
    model, y = copy.deepcopy(plain), torch.randn(4, 16)
    with flk.init(strategy="full_shard", log_every=0) as run:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        flk.replicated(optimizers[0])
        plan = {"*.up": "colwise", "*.down": "rowwise"}
        model, _ = run.parallelize(model, optimizers[1], tp=2, tp_plan=plan, compile="eager")
        for step in range(2):
            losses = [each(y).square().mean() for each in (plain, model)]
            for loss, optimizer in zip(losses, optimizers):
                optimizer.zero_grad(), loss.backward(), optimizer.step()
            torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-6)
            run.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print("same when compiled")
    dist.barrier()
"""


def test_a_model_of_hugging_face_is_split_by_its_own_plan(ranks: Ranks) -> None:
    """A compiled model is split by a plan that the script gives."""
    result, _ = ranks(HUGGING_FACE, 2, {})
    assert result.output.count("same") == 3


REFUSED = (
    MODEL
    + """
    def refused(strategy="full_shard", model=None, before=lambda run: None, **options):
        with flk.init(strategy=strategy, log_every=0) as run:
            try:
                before(run)
                model = model or build()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model, optimizer = run.parallelize(model, optimizer, **options)
                model(torch.zeros(1, 8, dtype=torch.int64)).square().mean().backward()
                optimizer.step()
            except flk.SetupError as error:
                print(f"refused: {error}")
            else:
                print("refused: nothing")

    tied = build()
    tied.head.weight = tied.embed.weight
    TP = {"mesh": {"tp": 2}}
    refused("ddp", tp=2, tp_plan=PLAN)
    refused(tp=3, tp_plan=PLAN)
    refused(tp=2)
    refused(tp=2, tp_plan={"layers.*.out": "colwise"})
    refused(tp=2, tp_plan={"head": "packed_colwise"})
    refused(tp_plan=PLAN)
    refused(mesh={"tp": 2})
    refused(mesh={"pp": 2}, parallelize=lambda model, mesh: setattr(model, "head", nn.Identity()))
    refused(mesh={"shard": 2}, parallelize=split)
    refused(mesh={"tp": 0}, parallelize=split)
    refused(**TP, parallelize=lambda model, mesh: nn.Linear(1, 1))
    refused(**TP, parallelize=lambda model, mesh: delattr(model.layers[0], "up"))
    refused(**TP, parallelize=lambda model, mesh: setattr(model.head, "weight", nn.Parameter(torch.zeros(6, 16))))
    refused(model=tied, tp=2, tp_plan=PLAN)
    refused(tp=2, tp_plan={key: style for key, style in PLAN.items() if "norm" not in key})
    refused(tp=2, tp_plan=PLAN, before=lambda run: run.loader(data, 2))
    refused("hybrid_shard", mesh={"cp": 2}, parallelize=split)
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(2))
    refused(tp=2, tp_plan=PLAN)
    del sampler
    with flk.init(strategy="full_shard", log_every=0) as run:
        # No parameter is whole, whose gradients could be compared.
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = run.parallelize(model, optimizer, tp=2, tp_plan={"0": "colwise", "2": "rowwise"})
        try:
            model(torch.ones(2, 4) * run.rank).square().mean().backward()
            optimizer.step()
        except flk.SetupError as error:
            print(f"refused: {error}")
    dist.barrier()
"""
)


def test_what_a_mesh_cannot_do_is_refused_by_name(ranks: Ranks) -> None:
    result, _ = ranks(REFUSED, 2, {})
    expected = [
        r"tp= needs a strategy that shards, and this run has ddp: use full_shard",
        r"the mesh \(tp 3\) does not divide the world size, 2: choose sizes that do",
        r"tp= needs a plan, and Model has none: pass tp_plan= with styles by paths",
        r"tp_plan= has 'layers\.\*\.out', and the model has no such module",
        r"the plan has the style 'packed_colwise' for 'head', which flk does not know: expected one of colwise, .*",
        r"tp_plan=: pass tp= with or without tp_plan=, or mesh= and parallelize=",
        r"mesh= and parallelize= need each other: pass sizes of dimensions, and a function",
        r"parallelize= has removed the parameter 'head\.weight' of the model: keep parameters and names",
        r"the mesh has a dimension 'shard': expected an identifier such as tp, and none of .*",
        r"the mesh has the size 0 for tp: expected a number of ranks from 1 on",
        r"parallelize= returned a Linear that is not the model: .*",
        r"parallelize= has removed the parameter 'layers\.0\.up\.weight' of the model: .*",
        r"parallelize= has changed the shape of 'head\.weight' from \(11, 16\) to \(6, 16\): use DTensors, .*",
        r"parallelize= has untied 'head\.weight' from 'embed\.weight', which would be trained apart: .*",
        r"the gradient of 'layers\.0\.head_norm\.weight' differs between ranks that hold the same values of it: .*",
        r"a loader was made before parallelize with mesh= or tp=: make loaders after it",
        r"the mesh has a dimension cp, which strategy hybrid_shard cannot use: use full_shard",
        r"a DistributedSampler gives 2 ranks data of their own, and this mesh has 1 groups .*: use run\.loader",
        r"ranks that differ only in the dimensions of the mesh had different batches: .*",
    ]
    refused = re.findall(r"refused: (.*)", result.output)
    assert len(refused) == len(expected)
    for line, pattern in zip(refused, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
