"""`weft comm advise`."""

from __future__ import annotations

import json as to_text
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli._numbers import parse_count, parse_latency, parse_rate
from weft.cli._options import Json, Overrides, refuse_plan_settings
from weft.errors import ClusterError, PlanError

if TYPE_CHECKING:
    import torch

    from weft.techniques.compression.codecs import Estimate, Link


def advise(
    recipe: Path | None = None,
    /,
    *,
    parameters: str | None = None,
    overrides: Overrides = (),
    processes: int | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    cluster: str | None = None,
    zero: int = 1,
    compute: str | None = None,
    powersgd_rank: int = 4,
    topk_share: float = 0.01,
    randomk_share: float = 0.1,
    json: Json = False,
) -> None:
    """Say whether compressing gradients would pay on a link, and by how much. Nothing is chosen.

    Bytes are counted exactly, codecs are timed on this machine, the link is the one that all data ranks share: given,
    or the outermost of a cluster. Compression loses precision, so a recipe must permit it.

    Parameters
    ----------
    recipe
        TOML file that says what to train; its model's parameters are what is exchanged.
    parameters
        Number of parameters in place of a recipe, such as 125M, taken as square matrices.
    processes
        Data ranks; by default the devices of the cluster.
    bandwidth
        Of one rank, one way, such as 1Gbit/s or 12.5GB/s.
    latency
        Of one message, such as 50us.
    cluster
        TOML file or a spec such as 4x8xh100, in place of bandwidth and latency; by default what weft probe has
        measured.
    zero
        ZeRO stage, 0 or 1. Under 1 the weights, in fp32, are gathered uncompressed in every step.
    compute
        What a step takes without communication, such as 300ms: then whole steps are compared.
    powersgd_rank
        Rank of PowerSGD's factors.
    topk_share
        Share of the gradients that top-k sends.
    randomk_share
        Share of the gradients that random-k sends.
    """
    import torch

    from weft.comm.device import device_for_rank
    from weft.techniques.compression.codecs import Exchange
    from weft.techniques.compression.codecs import advise as advise_codecs

    if not 0 <= zero <= 1:
        raise PlanError(
            f"--zero {zero}: one reduction per step is compared here, as ZeRO-0 and 1 have it; ZeRO-2 reduces in every"
            f" microbatch. Use 0 or 1."
        )
    link, members = _link(bandwidth, latency, cluster, processes)
    exchange = Exchange(shapes=_shapes(recipe, parameters, overrides), members=members, is_sharded=zero > 0)
    seconds = None if compute is None else parse_latency(compute, "--compute")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank of a plan has by default
    try:
        rows = advise_codecs(
            exchange,
            link,
            seconds,
            device_for_rank("auto", 0),
            powersgd_rank=powersgd_rank,
            topk_share=topk_share,
            randomk_share=randomk_share,
        )
    finally:
        torch.set_num_threads(threads)
    if json:
        print(to_text.dumps([asdict(codec) | {"verdict": verdict} for codec, verdict in rows], indent=2))
        return
    _print(rows, link, exchange.num_elements, members, zero)


def _print(rows: list[tuple[Estimate, str]], link: Link, elements: int, members: int, zero: int) -> None:
    rate = link.bandwidth_bytes_per_second * 8 / 1e9
    print(
        f"{elements:,} fp32 gradients, ZeRO-{zero}, {members} data ranks, {rate:g} Gbit/s and "
        f"{link.latency_seconds * 1e6:g} us per message\n"
    )
    has_step = rows[0][0].step_seconds is not None
    head = f"{'way':<17}{'sent':>12}{'wire':>12}{'codec':>12}{'together':>12}{'step' if has_step else '':>12}"
    print(head.rstrip())
    for codec, verdict in rows:
        figures = [codec.wire_seconds, codec.codec_seconds, codec.exchange_seconds, codec.step_seconds]
        times = "".join(f"{value * 1e3:>9,.1f} ms" for value in figures if value is not None)
        print(f"{codec.name:<17}{codec.bytes_sent / 1e6:>9,.1f} MB{times}   {verdict}".rstrip())
    if zero:
        print("\nsent and wire hold the gathering of the weights, which ZeRO does and nothing compresses")
    paying = [codec.name for codec, verdict in rows if verdict.startswith("pays")]
    advice = "none of them pays here" if not paying else f"would pay here: {', '.join(paying)}"
    print(
        f"\n{advice}.\nNothing is chosen: compression loses precision, so a recipe's permit.compression must name it"
        " before\na plan's data_parallel.compression can. What each costs in loss:"
        " docs/concepts/compression.md."
    )


def _link(bandwidth: str | None, latency: str | None, cluster: str | None, processes: int | None) -> tuple[Link, int]:
    from weft.config.cluster import known_machine, resolve_cluster
    from weft.techniques.compression.codecs import Link

    if processes is not None and processes < 2:
        raise PlanError(f"--processes {processes}: one data rank exchanges nothing. Use 2 or more.")
    if (bandwidth is None) != (latency is None):
        raise ClusterError("--bandwidth and --latency go together: give both, or neither.")
    if bandwidth is not None and latency is not None:
        if cluster is not None:
            raise ClusterError("--cluster and --bandwidth cannot go together. Use one of them.")
        seconds = parse_latency(latency, "--latency", zero=True)
        link = Link(latency_seconds=seconds, bandwidth_bytes_per_second=parse_rate(bandwidth, "--bandwidth"))
        return link, processes or 2
    known = known_machine().cluster if cluster is None else resolve_cluster(cluster)
    if not known.links:
        raise ClusterError(
            "nothing says how fast the links are. Give --bandwidth and --latency, a --cluster that has [[links]], or"
            " run weft probe first."
        )
    members = processes or known.num_devices
    if members < 2:
        raise PlanError("this cluster has one device, and one data rank exchanges nothing. Give --processes.")
    tier = next((tier for tier in known.links if tier.devices >= members), known.links[-1])
    return Link(
        latency_seconds=tier.latency_seconds, bandwidth_bytes_per_second=tier.bandwidth_bytes_per_second
    ), members


def _shapes(recipe: Path | None, parameters: str | None, overrides: tuple[str, ...]) -> tuple[torch.Size, ...]:
    from weft.techniques.compression.codecs import shapes_of_model

    if (recipe is None) == (parameters is None):
        raise PlanError("weft comm advise needs a RECIPE or --parameters, and not both. Try: --parameters 125M")
    if parameters is not None:
        if overrides:
            raise PlanError("--set changes a recipe, and none is given. Use --parameters alone, or a RECIPE.")
        number = int(parse_count(parameters, "--parameters"))
        if number < 1:
            raise PlanError(f"--parameters {parameters} is less than one. Give a whole number, such as 125M.")
        return shapes_of_model(number)
    from weft.analysis.blueprint import build_blueprint
    from weft.config.plan import Plan, apply_overrides
    from weft.config.recipe import load_recipe

    assert recipe is not None
    refuse_plan_settings("weft comm advise", overrides)
    with_overrides, _ = apply_overrides(load_recipe(recipe), Plan(), overrides)
    return tuple(p.shape for p in build_blueprint(with_overrides).module.parameters() if p.requires_grad)
