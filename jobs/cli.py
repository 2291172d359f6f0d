"""The command line: `python -m jobs <command>`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jobs import settings as configuration
from jobs.catalogue import Model, catalogue, pick, pick_variants
from jobs.errors import JobsError, RequestError
from jobs.naming import check_image, check_run_name, job_name, new_run_name
from jobs.render import RUN_LABEL, Manifest, Request, render, to_yaml
from jobs.settings import Overrides, Settings

_EPILOG = """\
exit codes: 0 done; 1 a bug; 2 the request is wrong; 3 the cluster or the network failed, or time ran out; \
4 a check found a difference"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    try:
        options = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except JobsError as error:
        print(f"jobs: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        traceback.print_exc()
        print(f"jobs: error: this is a bug: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def list_models(options: argparse.Namespace) -> int:
    """`list`: the catalogue."""
    from jobs.table import text_table

    models = catalogue()
    if options.json:
        print(json.dumps([dataclasses.asdict(model) for model in models.values()], indent=1))
        return 0
    rows = [
        (
            model.name,
            model.hub,
            f"{model.parameters / 1e9:.1f}B",
            ", ".join(model.variants),
            f"{'zarr3' if model.storage.zarr3 else 'zarr2'}{', OCDBT' if model.storage.ocdbt else ''}",
            f"{model.check.variant} {model.check.dtype} {model.check.max_kl_div:g}",
            f"{model.time_limit_hours:g} h",
            model.priority,
            "nightly" if model.nightly else "",
            "" if model.supported else "not supported yet",
        )
        for model in models.values()
    ]
    header = ("MODEL", "REPOSITORY", "SIZE", "VARIANTS", "STORAGE", "CHECK, MAX KL", "LIMIT", "PRIORITY", "", "")
    print(text_table(header, rows))
    return 0


def render_jobs(options: argparse.Namespace) -> int:
    """`render`: manifests to standard output."""
    manifests, _ = _rendered(options)
    sys.stdout.write(to_yaml([manifest for manifest, _ in manifests]))
    return 0


def submit_jobs(options: argparse.Namespace) -> int:
    """`submit`: create the Jobs."""
    from jobs.cluster import connect
    from jobs.submit import submit
    from jobs.table import text_table

    rendered, settings = _rendered(options)
    cluster = connect(settings.namespace, kubeconfig=options.kubeconfig, context=options.context)
    results = submit(
        cluster,
        [manifest for manifest, _ in rendered],
        _warn,
        sources=[] if options.skip_access_check else [_hub_source(model, options.source) for _, model in rendered],
        secret=settings.secret,
    )
    print(text_table(("MODEL", "JOB", "RESULT"), [(each.model, each.job, each.result) for each in results]))
    if not options.wait:
        return 0
    waiting = [each.job for each in results if each.result != "finished"]
    return _wait(cluster, waiting, options) if waiting else 0


def status(options: argparse.Namespace) -> int:
    """`status`: the table."""
    from jobs.status import observe

    cluster = _cluster(options)
    labels, names = _selection(options, needs_some=False)
    while True:
        found = observe(cluster, labels, names)
        if options.watch and sys.stdout.isatty():
            print("\033[H\033[2J", end="")
        _show(found, options)
        if not options.watch or (found and all(each.done for each in found)):
            return 0
        time.sleep(options.interval)
        if not sys.stdout.isatty():
            print()


def wait(options: argparse.Namespace) -> int:
    """`wait`: until every Job has ended."""
    from jobs.status import observe

    cluster = _cluster(options)
    labels, names = _selection(options)
    found = {each.job for each in observe(cluster, labels, names)}
    missing = [name for name in names if name not in found]
    gone = [name for name in missing if not _finished_without_job(options, name)]
    if gone or not (found or missing):
        raise RequestError(
            f"no Job {', '.join(gone) or f'of run {options.run_name}'} in namespace {cluster.namespace} "
            "and no finished output of it; was it submitted?"
        )
    for name in missing:
        print(f"{name}: its output is finished, its Job is gone", file=sys.stderr)
    return _wait(cluster, sorted(found), options) if found else 0


def logs(options: argparse.Namespace) -> int:
    """`logs`: what the containers write."""
    from jobs.logs import follow, show

    cluster = _cluster(options)
    labels, names = _selection(options)
    (follow if options.follow else show)(cluster, labels, names, options.container)
    return 0


def cancel(options: argparse.Namespace) -> int:
    """`cancel`: delete Jobs and their pods."""
    from jobs.cluster import delete_job, list_jobs

    cluster = _cluster(options)
    labels, names = _selection(options)
    wanted = names or [job["metadata"]["name"] for job in list_jobs(cluster, labels)]
    for name in wanted:
        print(f"{name}: {'deleted' if delete_job(cluster, name) else 'not there'}")
    if not wanted:
        print(f"no Job of run {options.run_name} is there")
    return 0


def cost(options: argparse.Namespace) -> int:
    """`cost`: the pool against a TPU slice."""
    from jobs import cost as costs
    from jobs.table import text_table

    models = _models(options) if options.models or options.all or options.nightly else list(catalogue().values())
    price = costs.node_price(options.machine_type) if options.node_price is None else options.node_price
    hours = dict.fromkeys((model.name for model in models), options.hours) if options.hours else {}
    if options.times:
        hours |= costs.read_times(options.times)
    tpu = dict.fromkeys((model.name for model in models), options.tpu_hours) if options.tpu_hours else {}
    table = costs.costs(models, price=price, hours=hours, tpu_hours=tpu)
    summed = costs.total(table)
    if options.json:
        entries = [{**dataclasses.asdict(each), "saving_percent": each.saving_percent} for each in (*table, summed)]
        print(json.dumps(entries, indent=1))
        return 0
    rows = [
        (
            each.model,
            f"{each.job_hours:.2f}",
            f"{each.node_hours:.2f}",
            f"{each.dollars:.2f}",
            f"{each.tpu_hours:.2f}",
            f"{each.tpu_dollars:.2f}",
            f"{each.saving_percent:.1f} %",
            "" if each.given else "estimated",
        )
        for each in (*table, summed)
    ]
    slice_ = costs.prices()["tpu"]["slice"]
    header = ("MODEL", "JOB HOURS", "NODE HOURS", "POOL $", f"{slice_} HOURS", f"{slice_} $", "CHEAPER", "TIME")
    print(text_table(header, rows))
    print(f"\n{costs.verdict(summed, price)}")
    print(f"List prices of {costs.prices()['date']}; sources and assumptions: jobs/prices.yaml.")
    return 0


def _rendered(options: argparse.Namespace) -> tuple[list[tuple[Manifest, Model]], Settings]:
    """What the options ask for, rendered, each with its model."""
    models = _models(options)
    settings = configuration.make(_outputs(options), _overrides(options))
    if not options.image:
        raise RequestError("--image is missing: the converter's image, best as NAME@sha256:...")
    for warning in check_image(options.image):
        _warn(warning)
    if (options.source or options.revision) and len(models) != 1:
        raise RequestError("--source and --revision are of one model; name one")
    run = check_run_name(options.run_name or new_run_name())
    if not options.run_name:
        print(f"jobs: run name {run}", file=sys.stderr)
    rendered = []
    for model in models:
        request = Request(
            model=model,
            run=run,
            image=options.image,
            variants=pick_variants(model, _variants(options, model, exact=bool(options.models))),
            priority=options.priority,
            source=options.source,
            revision=options.revision,
            allow_unsupported=options.allow_unsupported,
        )
        try:
            rendered.append((render(request, settings), model))
        except RequestError as error:
            if not options.all:
                raise
            # All means all that can be: what this pool or this version cannot do is named, not a failure.
            _warn(f"left out: {error}")
    if not rendered:
        raise RequestError("no model is left to convert")
    return rendered, settings


def _models(options: argparse.Namespace) -> list[Model]:
    models = catalogue()
    chosen = [flag for flag in ("all", "nightly") if getattr(options, flag)]
    if len(chosen) + bool(options.models) != 1:
        raise RequestError("name models, or give --all or --nightly: one of the three")
    if options.all:
        return list(models.values())
    if options.nightly:
        return [model for model in models.values() if model.nightly]
    return pick(options.models, models)


def _variants(options: argparse.Namespace, model: Model, *, exact: bool = True) -> list[str]:
    """The variants asked for; unless just these are meant, those of them that the model has."""
    wanted = [name for name in options.variants.split(",") if name]
    known = {name for each in catalogue().values() for name in each.variants}
    for name in wanted:
        if name not in known:
            raise RequestError(f"unknown variant {name!r}; there are {', '.join(sorted(known))}")
    if exact:
        return wanted
    having = [name for name in wanted if name in model.variants]
    return having or wanted


def _overrides(options: argparse.Namespace) -> Overrides:
    return Overrides(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Overrides)})


def _outputs(options: argparse.Namespace) -> Mapping[str, Any] | None:
    return configuration.read_outputs(options.stack_outputs) if options.stack_outputs else None


def _cluster(options: argparse.Namespace) -> Any:
    from jobs.cluster import connect

    namespace = configuration.namespace(_outputs(options), options.namespace)
    return connect(namespace, kubeconfig=options.kubeconfig, context=options.context)


def _selection(options: argparse.Namespace, *, needs_some: bool = True) -> tuple[dict[str, str], list[str]]:
    """Labels and Job names of what is meant: models of a run, Jobs by name, or a whole run."""
    run = check_run_name(options.run_name) if options.run_name else ""
    models = catalogue()
    names = []
    for name in options.names:
        if name in models and not run:
            raise RequestError(f"{name} is a model: give --run-name, or the Job's name")
        if run and name not in models and not name.endswith(run.lower()):
            pick([name], models)
        names.append(job_name(name, run) if name in models else name)
    if needs_some and not names and not run:
        raise RequestError("name models or Jobs, or give --run-name")
    return ({RUN_LABEL: run} if run else {}), names


def _finished_without_job(options: argparse.Namespace, name: str) -> bool:
    """Whether the output of a Job that is gone says that it was finished."""
    from jobs.naming import output_directory
    from jobs.reports import unfinished

    model = next((each for each in options.names if job_name(each, options.run_name) == name), "")
    if model not in catalogue():
        return False
    try:
        root = configuration.make(_outputs(options), _overrides(options)).output_root
    except RequestError:
        return False
    variants = pick_variants(catalogue()[model], _variants(options, catalogue()[model]))
    return not unfinished({each: output_directory(root, model, each, options.run_name) for each in variants}, model)


def _hub_source(model: Model, source: str) -> str:
    """The repository on the hub that a model is read from; "" for a folder or bucket."""
    source = source or model.hub
    return "" if source.startswith(("/", ".", "gs://")) else source.removeprefix("hf://").partition("@")[0]


def _wait(cluster: Any, names: Sequence[str], options: argparse.Namespace) -> int:
    from jobs.waiting import exit_code, wait_for

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    found = wait_for(cluster, names, timeout=options.timeout, interval=options.interval, tell=tell)
    _show(found, options)
    return exit_code(found)


def _show(found: Sequence[Any], options: argparse.Namespace) -> None:
    from jobs.table import duration, markdown_table, size, text_table

    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
        return
    rows = [
        (
            each.model,
            each.run,
            f"{each.state} ({each.step})" if each.step else each.state,
            str(each.position or "-"),
            each.node or "-",
            duration(each.elapsed_seconds),
            size(each.bytes),
            size(each.peak_memory_bytes),
            each.check or "-",
            each.reason,
        )
        for each in found
    ]
    header = ("MODEL", "RUN", "STATE", "POSITION", "NODE", "ELAPSED", "BYTES", "PEAK MEMORY", "CHECK", "REASON")
    print((markdown_table if options.markdown else text_table)(header, rows))


def _warn(text: str) -> None:
    print(f"jobs: warning: {' '.join(text.split())}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jobs",
        description="Convert models on the pool: one Kubernetes Job and one node for each.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        *groups: Callable[[argparse.ArgumentParser], None],
    ) -> None:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        for group in groups:
            group(sub)
        sub.set_defaults(run=run)

    command("list", list_models, "show the catalogue", _json_option)
    command("render", render_jobs, "print Jobs for `kubectl create -f -`", _model_options, _stack_options, _job_options)
    command(
        "submit",
        submit_jobs,
        "create Jobs, each once",
        _model_options,
        _stack_options,
        _job_options,
        _cluster_options,
        _submit_options,
        _wait_options,
        _show_options,
    )
    command(
        "status",
        status,
        "show what became of Jobs",
        _name_options,
        _stack_options,
        _cluster_options,
        _watch_options,
        _show_options,
    )
    command(
        "wait",
        wait,
        "wait until Jobs have ended",
        _name_options,
        _stack_options,
        _cluster_options,
        _variant_option,
        _wait_options,
        _show_options,
    )
    command("logs", logs, "show Jobs' logs", _name_options, _stack_options, _cluster_options, _log_options)
    command("cancel", cancel, "delete Jobs and their pods", _name_options, _stack_options, _cluster_options)
    command("cost", cost, "compare the pool's cost with a TPU slice's", _model_options, _cost_options, _json_option)
    return parser


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _show_options(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table, for a CI's summary")


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="`list` shows them")
    parser.add_argument("--all", action="store_true", help="every model of the catalogue that can be converted")
    parser.add_argument("--nightly", action="store_true", help="the models of the nightly pipeline")


def _variant_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", default="", metavar="A,B", help="only these variants (default: the catalogue's)")


def _stack_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the stack", "what `pulumi up` made; flags win over --stack-outputs")
    group.add_argument(
        "--stack-outputs", default="", metavar="FILE", help="of `pulumi stack output --json`; - is stdin"
    )
    for flag, text in (
        ("--bucket", "bucket for the output"),
        ("--output-root", "gs://BUCKET[/FOLDER], or a path inside the pod, instead of --bucket"),
        ("--output-claim", "PersistentVolumeClaim that is mounted at a path --output-root"),
        ("--namespace", "namespace of the Jobs"),
        ("--queue", "LocalQueue"),
        ("--service-account", "Kubernetes service account of the Jobs"),
        ("--secret", "Secret of the Hugging Face token"),
        ("--secret-key", "the token's key in it"),
        ("--machine-type", "of the pool, which decides what a pod requests"),
        ("--node-pool", "value of the pool's label and taint"),
    ):
        group.add_argument(flag, default="", metavar="NAME", help=text)


def _job_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the Jobs")
    group.add_argument("--image", default="", metavar="NAME", help="the converter's image, best as NAME@sha256:...")
    group.add_argument(
        "--run-name", default="", metavar="NAME", help="names Jobs and output (default: conv-<UTC time>)"
    )
    _variant_option(parser)
    group.add_argument(
        "--priority", default="", choices=("very-high", "high", "medium", "low"), help="instead of the catalogue's"
    )
    group.add_argument("--source", default="", metavar="SOURCE", help="repository or folder instead of the catalogue's")
    group.add_argument("--revision", default="", metavar="REVISION", help="branch, tag or commit of the source")
    group.add_argument(
        "--allow-unsupported", action="store_true", help="render models the converter cannot convert yet"
    )


def _cluster_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster", "by default that of the kubeconfig, else the one this runs in")
    group.add_argument("--kubeconfig", default="", metavar="FILE", help="default: $KUBECONFIG, ~/.kube/config")
    group.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig")


def _submit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-access-check", action="store_true", help="do not ask the hub about gated models")
    parser.add_argument("--wait", action="store_true", help="wait until they have ended, as `wait` does")


def _name_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a model, with --run-name, or a Job's name")
    parser.add_argument("--run-name", default="", metavar="NAME", help="the run; alone it means all its Jobs")


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("give seconds above zero")
    return value


def _watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="show it again until all have ended")
    parser.add_argument(
        "--interval", type=_seconds, default=10.0, metavar="SECONDS", help="between looks (default: 10)"
    )


def _wait_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=_seconds, default=None, metavar="SECONDS", help="give up then, exit code 3 (default: never)"
    )
    parser.add_argument(
        "--interval", type=_seconds, default=10.0, metavar="SECONDS", help="between looks (default: 10)"
    )


def _log_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", "-f", action="store_true", help="until the Job has ended")
    parser.add_argument("--container", default="", metavar="NAME", help="only this one, as convert-scanned or check")


def _cost_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine-type", default="n2-highmem-64", metavar="NAME", help="of the pool")
    parser.add_argument("--node-price", type=float, default=None, metavar="DOLLARS", help="an hour, as for Spot")
    parser.add_argument("--hours", type=_seconds, default=None, help="of each Job (default: estimated from its size)")
    parser.add_argument("--tpu-hours", type=_seconds, default=None, help="of each slice (default: those of the node)")
    parser.add_argument("--times", default="", metavar="FILE", help="measured, of `status --json`")
