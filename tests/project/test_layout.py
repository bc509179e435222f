"""Every module has a test: a file of its own at its mirrored place, or a row that says which file covers it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layout")  # all modules are parsed once

ROOT = Path(__file__).parents[2]
PACKAGES = {"flk": ROOT / "operator_client" / "flk"}
PACKAGES |= {folder.name: folder for folder in (ROOT / "runtime").glob("flk_*")}

# Test files, and the modules without a test file of their own that they cover.
COVERED = {
    "tests/cluster/test_exec.py": "flk.cli.exec",
    "tests/cluster/test_manifests.py": "flk.labels",
    "tests/local/test_gather.py": "flk_runtime.checkpoint.pod_exchange",
    "tests/local/test_accumulation.py": "flk_runtime.run.backward",
    "tests/local/test_automatic.py": "flk_plan.automatic",
    "tests/local/test_bench.py": (
        "flk.cli.bench flk_plan.bench.__main__ flk_plan.bench.cases flk_plan.bench.collectives flk_plan.bench.script"
    ),
    "tests/local/test_checkpoint.py": ("flk_runtime.checkpoint.save.plan"),
    "tests/local/test_collectives.py": "flk_runtime.distributed.broadcast_state flk_runtime.distributed.collectives",
    "tests/local/test_curves.py": "flk_sinks.wandb",
    "tests/local/test_diloco.py": (
        "flk_diloco.__main__ flk_diloco.exchange flk_diloco.fragments "
        "flk_diloco.lead flk_diloco.messages flk_diloco.server flk_diloco.worker"
    ),
    "tests/local/test_failure_kinds.py": "flk_runtime.contract.exit_codes",
    "tests/local/test_fresh_ranks.py": "flk_runtime.launcher.processes.rank_process",
    "tests/local/test_init.py": (
        "flk_runtime.preflight.options flk_runtime.run.group flk_runtime.run.init flk_runtime.run.training"
    ),
    "tests/local/test_launcher.py": "flk_runtime.__main__ flk_runtime.launcher.coordinator",
    "tests/local/test_memory.py": (
        "flk_runtime.launcher.coordinator.memory_plans flk_runtime.launcher.replication.messages "
        "flk_runtime.launcher.replication.service"
    ),
    "tests/local/test_metrics_page.py": ("flk_runtime.metrics.logging"),
    "tests/local/test_optimizer.py": ("flk_runtime.distributed.buckets flk_runtime.distributed.main_process"),
    "tests/local/test_hosts_accelerate_launch.py": "flk_hosts.accelerate_launch",
    "tests/local/test_hosts_torchtitan.py": "flk_hosts.torchtitan",
    "tests/local/test_verify.py": "flk_verify.__main__ flk_verify.start flk_verify.watch",
    "tests/unit/flk_verify/test_compare.py": "flk_verify.causes",
    "tests/unit/flk_hosts/test_loaders.py": "flk_hosts.generators",
    "tests/unit/flk_hosts/test_lightning.py": "flk_hosts.sums",
    "tests/local/test_loop.py": "flk_runtime.run.adopt flk_runtime.run.loop",
    "tests/local/test_profiling.py": "flk_runtime.profiling.ask",
    "tests/local/test_agreement.py": "flk_runtime.run.agreement",
    "tests/unit/flk/health/test_maintenance.py": "flk.health.volume_nodes",
    "tests/local/test_plan.py": "flk.planning flk_plan.__main__",
    "tests/local/test_preflight.py": (
        "flk_runtime.contract.preflight flk_runtime.preflight.bootstrap flk_runtime.preflight.exchange "
        "flk_runtime.preflight.waiting"
    ),
    "tests/local/test_run.py": (
        "flk_runtime.run.batches flk_runtime.run.context flk_runtime.run.metrics flk_runtime.run.models "
        "flk_runtime.run.saves"
    ),
    "tests/local/test_steps.py": "flk_runtime.run.steps",
    "tests/local/test_s3.py": (
        "flk_runtime.checkpoint.storage.destination flk_runtime.checkpoint.storage.manifest "
        "flk_runtime.checkpoint.storage.s3"
    ),
    "tests/local/test_script_checkpoints.py": "flk_runtime.run.current flk_runtime.run.script",
    "tests/local/test_precision.py": "flk_runtime.parallel.precision",
    "tests/local/test_sharded_checkpoints.py": (
        "flk_runtime.checkpoint.adapters.adapt flk_runtime.checkpoint.adapters.fsdp1 flk_runtime.distributed.fsdp1"
    ),
    "tests/local/test_strategies.py": (
        "flk_runtime.data.uneven_inputs flk_runtime.parallel.ddp flk_runtime.parallel.fsdp2 flk_runtime.parallel.model"
    ),
    "tests/local/test_weights.py": ("flk_runtime.checkpoint.files.export flk_runtime.checkpoint.files.safetensors"),
    "tests/unit/flk/bench/test_bench.py": (
        "flk.bench.job flk.bench.result flk_plan.bench.transport flk_plan.calibration"
    ),
    "tests/unit/flk/cli/outputs/test_cp.py": "flk.cli.cp",
    "tests/unit/flk/cli/outputs/test_delete.py": "flk.cli.delete flk.jobs.lifecycle.deletion",
    "tests/unit/flk/cli/outputs/test_init.py": "flk.cli.init",
    "tests/unit/flk/cli/outputs/test_list.py": "flk.cli.list flk.cli.list_text",
    "tests/unit/flk/cli/outputs/test_several.py": "flk.cli.several",
    "tests/unit/flk/cli/outputs/test_logs.py": "flk.cli.log_output flk.cli.logs",
    "tests/unit/flk/cli/outputs/test_render.py": "flk.cli.render",
    "tests/unit/flk/cli/outputs/test_report.py": "flk.cli.report",
    "tests/unit/flk/cli/outputs/test_run.py": "flk.cli.run",
    "tests/unit/flk/cli/outputs/test_status.py": "flk.cli.status flk.cli.status_text",
    "tests/unit/flk/cli/outputs/test_submit.py": "flk.cli.options flk.cli.submit flk.spec.overlay",
    "tests/unit/flk/cli/outputs/test_suspend.py": "flk.cli.suspend",
    "tests/unit/flk/cli/outputs/test_wait.py": "flk.cli.wait",
    "tests/unit/flk/cli/outputs/test_why.py": "flk.cli.explain flk.cli.why",
    "tests/unit/flk/cli/test_cli.py": "flk.__main__ flk.cli",
    "tests/unit/flk/cli/test_global_options.py": "flk.kube.kubectl flk.kube.options",
    "tests/unit/flk/cli/test_jsonpath.py": "flk.cli.data_output flk.cli.table",
    "tests/unit/flk/cli/test_profile.py": "flk.cli.profile_text flk.jobs.profiling",
    "tests/unit/flk/cli/test_progress_line.py": "flk.cli.screen",
    "tests/unit/flk/cli/test_stacks.py": "flk.jobs.stacks",
    "tests/unit/flk/health/test_built_causes.py": (
        "flk.health.gang flk.health.node flk.health.preparation flk.health.refusal"
    ),
    "tests/unit/flk/health/test_causes.py": (
        "flk.health.cause flk.health.ending flk.health.failure flk.health.foreign_logs "
        "flk.health.page flk.health.queue flk.health.rendezvous flk.health.scheduler_message "
        "flk.health.scheduling flk.health.table flk.health.volumes flk.health.why"
    ),
    "tests/unit/flk/health/test_devices.py": "flk.observe.suspects",
    "tests/unit/flk/health/test_doctor.py": (
        "flk.cli.doctor flk.health.admission flk.health.cluster flk.health.controllers flk.health.quota "
        "flk.health.references flk.health.resources flk.health.rights flk.jobs.choice flk.targets.controllers "
        "flk.trial"
    ),
    "tests/unit/flk/jobs/lifecycle/test_creation.py": "flk.jobs.lifecycle.secret flk.manifest.rendezvous",
    "tests/unit/flk/jobs/lifecycle/test_expiry.py": "flk.jobs.submission",
    "tests/unit/flk/jobs/lifecycle/test_suspension.py": "flk.cli.restart flk.jobs.lifecycle.restart",
    "tests/unit/flk/jobs/test_copying.py": "flk.jobs.received",
    "tests/unit/flk/jobs/test_handle.py": "flk.jobs.state.html",
    "tests/unit/flk/jobs/test_elastic_job.py": "flk.cli.scale flk.jobs.lifecycle.scaling",
    "tests/unit/flk/jobs/test_logs.py": (
        "flk.jobs.logs.dump flk.jobs.logs.first_error flk.jobs.logs.lines flk.jobs.logs.poller "
        "flk.jobs.logs.position flk.jobs.logs.reader flk.jobs.logs.stream flk.terminal"
    ),
    "tests/unit/flk/jobs/test_state.py": "flk.jobs.state.derive flk.jobs.state.model flk.observe.pods",
    "tests/unit/flk/jobs/test_wait.py": (
        "flk.jobs.wait.conclusion flk.jobs.wait.follow flk.jobs.wait.goal flk.jobs.wait.quiet"
    ),
    "tests/unit/flk/kube/test_client.py": "flk.kube.errors",
    "tests/unit/flk/kube/test_hostile_text.py": "flk.cli.resume",
    "tests/unit/flk/kube/test_kubeconfig.py": "flk.kube.connection flk.kube.credentials flk.kube.exec_plugin",
    "tests/unit/flk/jobs/test_many.py": "flk.observe.shared",
    "tests/unit/flk/kube/test_watch.py": (
        "flk.kube.resources flk.observe.cache flk.observe.follower flk.observe.resources"
    ),
    "tests/unit/flk/manifest/test_bundle.py": "flk.manifest.files flk.manifest.ignore_file",
    "tests/unit/flk/manifest/test_golden.py": "flk.manifest.pod flk.manifest.text",
    "tests/unit/flk/observe/test_archive.py": (
        "flk.health.deletion flk.jobs.archive_writer flk.jobs.tails flk.observe.archive.format "
        "flk.observe.archive.local flk.observe.archive.redaction flk.observe.model flk.observe.observation "
        "flk.observe.reader flk.observe.view"
    ),
    "tests/unit/flk/observe/test_old_archives.py": "flk.observe.archive.records",
    "tests/unit/flk/spec/test_job.py": (
        "flk.spec.parts flk.manifest.environment flk.spec.fields flk.spec.table flk.spec.validation "
        "flk_runtime.contract.strategies"
    ),
    "tests/unit/flk/manifest/test_volumes.py": "flk.spec.gpus flk.spec.mounts",
    "tests/unit/flk/spec/test_schema.py": "flk.spec.options",
    "tests/unit/flk/targets/test_targets.py": (
        "flk.targets flk.targets.indexed flk.targets.job flk.targets.jobset "
        "flk.targets.model flk.targets.pytorchjob flk.targets.trainjob"
    ),
    "tests/unit/flk/report/test_build.py": "flk.report.model",
    "tests/unit/flk/test_commands.py": "flk.jobs.cluster",
    "tests/unit/flk/test_public_api.py": "flk.errors",
    "tests/unit/flk_runtime/checkpoint/test_metadata.py": "flk_runtime.checkpoint.load",
    "tests/unit/flk_runtime/checkpoint/test_state_reuse.py": (
        "flk_runtime.checkpoint.adapters.wrappers flk_runtime.checkpoint.state"
    ),
    "tests/unit/flk_runtime/data/test_iterable.py": (
        "flk_runtime.data.factory flk_runtime.data.parts flk_runtime.data.reader"
    ),
    "tests/unit/flk_runtime/data/test_map_style.py": "flk_runtime.data.loader",
    "tests/unit/flk_diloco/test_diloco.py": (
        "flk.spec.diloco flk_diloco.compression flk_diloco.options flk_diloco.outer "
        "flk_diloco.rounds flk_diloco.strategy flk_diloco.tls"
    ),
    "tests/unit/flk_runtime/discovery/test_discover.py": (
        "flk_runtime.discovery.environment flk_runtime.discovery.launchers flk_runtime.discovery.rank_info "
        "flk_runtime.discovery.readers flk_runtime.discovery.variables"
    ),
    "tests/unit/flk_runtime/launcher/hangs/test_hangs.py": (
        "flk_runtime.launcher.hangs.diagnosis flk_runtime.launcher.hangs.detector "
        "flk_runtime.launcher.hangs.report flk_runtime.launcher.hangs.snapshot"
    ),
    "tests/unit/flk_runtime/launcher/hangs/test_phases.py": "flk_runtime.contract.hang_timeout",
    "tests/unit/flk_runtime/launcher/hangs/test_watch.py": "flk_runtime.contract.phase flk_runtime.contract.status",
    "tests/unit/flk_runtime/launcher/coordinator/test_leader.py": "flk_runtime.launcher.coordinator.round",
    "tests/unit/flk_runtime/launcher/records/test_archive.py": "flk_runtime.contract.record",
    "tests/unit/flk_runtime/launcher/processes/test_failures.py": (
        "flk_runtime.contract.failure flk_runtime.contract.failure_text flk_runtime.launcher.processes.rank_failure "
        "flk_runtime.system.faults flk_runtime.system.text"
    ),
    "tests/unit/flk_runtime/launcher/web/test_trainer_forward.py": "flk_runtime.launcher.web.http",
    "tests/unit/flk_runtime/launcher/test_preemption.py": "flk_runtime.shared.progress",
    "tests/unit/flk_runtime/launcher/test_settings.py": "flk_runtime.contract.pod_env",
    "tests/unit/flk_plan/test_capture.py": "flk_plan.fake",
    "tests/unit/flk_plan/test_choice.py": ("flk_plan.communication flk_plan.plan flk_plan.trace"),
    "tests/unit/flk_plan/test_hardware.py": "flk_plan.predict",
    "tests/unit/flk_runtime/preflight/test_preflight.py": (
        "flk_runtime.check flk_runtime.preflight.compare flk_runtime.preflight.report"
    ),
    "tests/unit/flk_runtime/run/test_options.py": "flk_runtime.system.trial",
    "tests/unit/flk_runtime/shared/test_shard_file.py": "flk_runtime.checkpoint.shard",
    "tests/unit/flk_runtime/system/test_pytree.py": "flk_runtime.distributed.consistency",
    "tests/unit/flk_runtime/contract/test_telemetry_archive.py": "flk_runtime.contract.telemetry",
    "tests/unit/flk_runtime/test_contract.py": "flk_runtime.contract.log_format flk_runtime.contract.user_env",
    "tests/unit/flk_runtime/test_errors.py": ("flk_runtime.checkpoint.memory flk_runtime.shared.failure_report"),
    "tests/unit/flk_runtime/test_variable.py": "flk_runtime.contract.variable",
    "tests/unit/flk_runtime/wire/test_registry.py": "flk_runtime.contract.typed",
}
ROWS = [(test, module) for test, modules in COVERED.items() for module in modules.split()]


@functools.cache
def sources() -> dict[str, ast.Module]:
    """All modules and packages."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def has_code(module: str) -> bool:
    """Whether a module needs a test: a package that only exports names does not."""
    package, *parts = module.split(".")
    return not PACKAGES[package].joinpath(*parts).is_dir() or bool(definitions(sources()[module]))


@functools.cache
def known_by(module: str) -> set[str]:
    """The names by which a test uses a module: its own, of what it defines, and the word of a command or a program."""
    *packages, name = module.split(".")
    words = {name.replace("_", "-")} if "cli" in packages else {packages[-1]} if name == "__main__" else set()
    return {module} | words | definitions(sources()[module])


@functools.cache
def users_of(module: str) -> set[str]:
    """The modules that import something of a module, also through its package, or start it as a program."""
    names, package = {module}, module.rpartition(".")[0]
    for node in ast.walk(sources()[package]) if package else ():
        if isinstance(node, ast.ImportFrom) and node.module == module:
            names |= {f"{package}.{alias.name}" for alias in node.names}
    return {user for user, used in used_by_modules().items() if names & used}


@functools.cache
def used_by_modules() -> dict[str, set[str]]:
    """For each module the names of what it imports, and of modules that it has as strings: it starts them."""
    found = {}
    for user, module in sources().items():
        strings = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant)}
        found[user] = imported_by(module) | {each for each in sources() if each in strings}
    return found


def imported_by(module: ast.Module) -> set[str]:
    """The names of what a module imports, and of where it imports it from."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def definitions(module: ast.Module) -> set[str]:
    """The names of public classes, methods, functions and constants, and the codes of causes."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Cause" and node.args:
            names.add(str(getattr(node.args[0], "value", "")))
    classes = [statement for statement in module.body if isinstance(statement, ast.ClassDef)]
    for statement in [*module.body, *(each for kind in classes for each in kind.body)]:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign | ast.Assign) and statement in module.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()}
    return {name for name in names if not name.startswith("_")}


@functools.cache
def names_in(test: str) -> set[str]:
    """The names that a test file uses, with the names of modules that it imports and the words in its strings.

    Those of a module of tests.support that it imports as a whole are among them: it may have the scripts.
    """
    found: set[str] = set()
    module = ast.parse((ROOT / test).read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(module) if isinstance(node, documented)}
    found |= imported_by(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
            for alias in node.names if node.module == "tests.support" else ():
                found |= names_in(f"tests/support/{alias.name}.py")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
            found |= {*re.findall(r"[\w.-]+", node.value), *re.findall(r"\w+", node.value)}
    return found


@functools.cache
def modules() -> list[str]:
    """The modules that need a test. They are parsed when a test asks, not by each worker when it collects the tests."""
    return sorted(filter(has_code, sources()))


def own_test(module: str) -> Path:
    """Where the test file of a module is."""
    *folders, name = module.split(".")
    return ROOT.joinpath("tests", "unit", *folders, f"test_{name.strip('_')}.py")


def test_every_module_has_a_test_or_a_row() -> None:
    covered = {module for _, module in ROWS}
    assert [module for module in modules() if module not in covered and not own_test(module).exists()] == []


def test_no_row_is_needless() -> None:
    rows = [module for _, module in ROWS]
    assert len(rows) == len(set(rows))
    assert [module for module in rows if module not in modules() or own_test(module).exists()] == []


def test_the_test_of_a_row_names_the_module_or_one_that_uses_it() -> None:
    def names(test: str, module: str) -> bool:
        users = {module, *users_of(module)}
        users |= {user for each in users for user in users_of(each)}  # those of the module that only one other uses
        return any(names_in(test) & known_by(each) for each in users)

    assert [(test, module) for test, module in ROWS if not names(test, module)] == []


def test_the_run_is_a_facade() -> None:
    lines = (ROOT / "runtime" / "flk_runtime" / "run" / "run.py").read_text().splitlines()
    assert len(lines) <= 300, "what a run does belongs into flk_runtime.run.steps, saves, batches, models or backward"
