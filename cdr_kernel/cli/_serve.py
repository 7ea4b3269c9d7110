"""The command `cdr serve`."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Annotated

import typer

from cdr_kernel.cli._options import (
    ClampNoveltyOption,
    CompletionThresholdOption,
    EmbedOption,
    ExcludePackedOption,
    ExhaustionOption,
    FirstWindowPullOption,
    GateOnOption,
    GateOption,
    GuardOption,
    MinRelevanceOption,
    Mode,
    ModeOption,
    ResidualDepthOption,
    SafetyBudgetOption,
    SourceOption,
    session_settings,
)
from cdr_kernel.spec.constants import MAX_WINDOWS, MAX_WINDOWS_LIMIT


def serve(
    store: Annotated[
        Path,
        typer.Argument(metavar="STORE", help="Folder of a store; with the keys of several tenants, STORE/TENANT each."),
    ],
    host: Annotated[str, typer.Option(help="Where to listen; other than loopback needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any; the log says which.")] = 8080,
    keys: Annotated[
        Path | None, typer.Option(metavar="KEYS.json", help="Bearer keys and their tenants, as SHA-256.")
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Listen beyond loopback without keys: anyone may change everything.")
    ] = False,
    embed: EmbedOption = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", envvar="CDR_SERVE_REDIS", help="Redis for sessions of all replicas.")
    ] = None,
    token_key: Annotated[
        str | None,
        typer.Option(metavar="SECRET", envvar="CDR_SERVE_TOKEN_KEY", help="Signs session tokens, 32 bytes at least."),
    ] = None,
    metrics_key: Annotated[
        str | None,
        typer.Option(metavar="SECRET", envvar="CDR_SERVE_METRICS_KEY", help="Bearer key for /metrics, with --keys."),
    ] = None,
    hash_key: Annotated[
        str | None,
        typer.Option(metavar="SECRET", envvar="CDR_SERVE_HASH_KEY", help="The hash_key that the store was made with."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further name that requests may have in Host; several: once each."),
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(min=1, help="Connections at once; else what the process may open leaves room for.")
    ] = None,
    header_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for the head of a request.")] = 10.0,
    keep_alive: Annotated[float, typer.Option(min=0.001, help="Seconds that an idle connection stays.")] = 65.0,
    max_names: Annotated[int, typer.Option(min=1, help="Ids, names and values that one request may list.")] = 10_000,
    max_names_mb: Annotated[float, typer.Option(min=0.001, help="Their size, MiB.")] = 1.0,
    max_facts: Annotated[int, typer.Option(min=1, help="Facts that one request may add.")] = 10_000,
    max_attributes: Annotated[int, typer.Option(min=1, help="Names of attributes in one store.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests of a tenant at once; more get 429.")] = 128,
    max_batch: Annotated[int, typer.Option(min=1, help="Ranks that are made together.")] = 8,
    rank_threads: Annotated[int, typer.Option(min=1, help="Batches that are made at a time.")] = 2,
    device: Annotated[
        str | None, typer.Option(metavar="cuda|cuda:1|...", help="Rank on this device; else a scan on the processor.")
    ] = None,
    device_dtype: Annotated[
        str | None, typer.Option(metavar="float16|bfloat16|float32|int8", help="What it holds the rows in.")
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.01, help="Largest request, MiB.")] = 16.0,
    max_answer_mb: Annotated[float, typer.Option(min=0.01, help="Largest answer, MiB.")] = 64.0,
    request_mb: Annotated[
        float, typer.Option(min=0.01, help="Bodies of a tenant's requests that are held at once, MiB.")
    ] = 256.0,
    answer_mb: Annotated[
        float, typer.Option(min=0.01, help="Answers of a tenant that their readers have not taken yet, MiB.")
    ] = 256.0,
    send_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a client has to read 64 KiB of an answer.")
    ] = 30.0,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 30.0,
    session_ttl: Annotated[float, typer.Option(min=1.0, help="Seconds that a session stays unused.")] = 3600.0,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions of a tenant in memory.")] = 10_000,
    session_mb: Annotated[int, typer.Option(min=1, help="Memory for a tenant's sessions, MiB.")] = 512,
    redis_sessions: Annotated[int, typer.Option(min=1, help="Sessions of a tenant in Redis.")] = 100_000,
    redis_mb: Annotated[int, typer.Option(min=1, help="Sessions of a tenant in Redis, MiB.")] = 2048,
    row_cache_mb: Annotated[int, typer.Option(min=0, help="Memory for what ranks keep, MiB a tenant.")] = 256,
    threads: Annotated[int, typer.Option(min=1, help="Threads that pack, encode and write facts.")] = 2,
    refresh: Annotated[float, typer.Option(min=0.01, help="Seconds between looks at a durable store.")] = 1.0,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds from SIGTERM to closing the port.")] = 1.0,
    stop: Annotated[float, typer.Option(min=0.0, help="Seconds that accepted requests then have.")] = 30.0,
    mode: ModeOption = Mode.spec,
    min_relevance: MinRelevanceOption = None,
    gate_at: GateOption = None,
    gate_on: GateOnOption = None,
    source: SourceOption = None,
    windows: Annotated[
        int | None, typer.Option(min=1, max=MAX_WINDOWS_LIMIT, help=f"Windows of a session at most ({MAX_WINDOWS}).")
    ] = None,
    guard: GuardOption = None,
    exclude_packed: ExcludePackedOption = False,
    completion_threshold: CompletionThresholdOption = None,
    safety_budget: SafetyBudgetOption = None,
    exhaustion: ExhaustionOption = None,
    first_window_pull: FirstWindowPullOption = False,
    clamp_novelty: ClampNoveltyOption = False,
    residual_depth: ResidualDepthOption = None,
    otel: Annotated[bool, typer.Option("--otel", help="Trace with OpenTelemetry (extra otel).")] = False,
    no_access_log: Annotated[bool, typer.Option("--no-access-log", help="Log no line per request.")] = False,
) -> None:
    """Serve a store over HTTP: facts, sessions, ranking, reranking. See docs/serving.md.

    The options from --mode to --residual-depth are the defaults of new sessions; a request for one may say otherwise.
    """
    from cdr_kernel.serve import Settings
    from cdr_kernel.serve import serve as run_server

    sizes = {
        "--max-names-mb": max_names_mb,
        "--max-body-mb": max_body_mb,
        "--max-answer-mb": max_answer_mb,
        "--request-mb": request_mb,
        "--answer-mb": answer_mb,
    }
    for option, size in sizes.items():
        if not size * 2**20 < float("inf"):  # infinite, or no number
            raise typer.BadParameter(f"expected a finite number, got {size}", param_hint=option)
    new_sessions = session_settings(
        mode,
        min_relevance=min_relevance,
        gate=gate_at,
        gate_on=gate_on,
        source_weight=source,
        max_windows=windows,
        exclude_packed=exclude_packed,
        completion_threshold=completion_threshold,
        safety_budget=safety_budget,
        exhaustion=exhaustion,
        first_window_pull=first_window_pull,
        clamp_novelty=clamp_novelty,
        residual_depth=residual_depth,
    )
    if guard is not None:
        new_sessions["guard"] = guard
    if device is not None:
        from cdr_kernel.score._device_rows import check_dtype, torch_device

        option = "--device"
        try:
            torch_device(device)
            option = "--device-dtype"
            check_dtype(device_dtype)
        except ValueError as error:
            raise typer.BadParameter(str(error).partition(": ")[2], param_hint=option) from None
    settings = Settings(
        store=store,
        host=host,
        port=port,
        keys=keys,
        open_to_all=open_to_all,
        metrics_key=metrics_key,
        token_key=None if token_key is None else token_key.encode(),
        hash_key=None if hash_key is None else hash_key.encode(),
        embed=embed,
        redis=redis,
        allowed_hosts=tuple(allowed_host or ()),
        max_connections=max_connections,
        header_timeout_s=header_timeout,
        keep_alive_s=keep_alive,
        max_names=max_names,
        max_names_bytes=round(max_names_mb * 2**20),
        max_facts=max_facts,
        max_attributes=max_attributes,
        max_body=round(max_body_mb * 2**20),
        max_answer=round(max_answer_mb * 2**20),
        request_bytes=round(request_mb * 2**20),
        answer_bytes=round(answer_mb * 2**20),
        send_timeout_s=send_timeout,
        max_queue=max_queue,
        max_batch=max_batch,
        rank_threads=rank_threads,
        device=device,
        device_dtype=device_dtype,
        deadline_s=deadline,
        session_ttl_s=session_ttl,
        max_sessions=max_sessions,
        session_bytes=session_mb << 20,
        redis_sessions=redis_sessions,
        redis_bytes=redis_mb << 20,
        row_cache_bytes=row_cache_mb << 20,
        threads=threads,
        refresh_s=refresh,
        drain_s=drain,
        stop_s=stop,
        otel=otel,
        access_log=not no_access_log,
        new_sessions=new_sessions,
    )
    warnings.simplefilter("ignore", UserWarning)  # of single sessions: their numbers are in every answer
    status = run_server(settings)
    from cdr_kernel.serve._process import end_process, threads_run

    if threads_run():  # an orderly end would wait for them, or pull the ground from under a model's library
        end_process(status)
    if embed is not None:
        gc.freeze()  # else the interpreter's end looks through all that the model's libraries have made: seconds
    if status:
        raise typer.Exit(status)
