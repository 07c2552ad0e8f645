"""Writes the dashboard of runs, and puts it where the Grafana of a Ray cluster looks for dashboards.

python cluster/grafana/dashboard.py                     write rayrft.json beside this file
python cluster/grafana/dashboard.py DASHBOARDS_FOLDER   also add it to the dashboards that Ray has written there:
                                                        as one of its own, and as a row of Ray's Core dashboard
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
FIRST_ID = 7000
"""Panels of Ray's dashboards have smaller ids."""
WIDTH, HEIGHT = 8, 8
CORE = "default_grafana_dashboard.json"
"""Ray's file of the dashboard in the tab Metrics."""


def last(name: str, by: str = "run") -> str:
    """Return the query of a gauge; a restarted Master's last value lasts some seconds beside the new one."""
    return f'max by ({by}) (ray_rayrft_{name}{{run=~"$run"}})'


def either(name: str) -> str:
    """Return the query of a gauge that runs have from their steps, and explore jobs from their rollouts."""
    return f"{last(f'train_{name}')} or {last(f'rollout_{name}')}"


def count(name: str, by: str = "run") -> str:
    """Return the query of a counter, 0 before the first."""
    return (
        f'sum by ({by}) (ray_rayrft_{name}_total{{run=~"$run"}}) or on (run) 0 * {last("progress_timestamp_seconds")}'
    )


def rate(name: str, by: str = "run") -> str:
    return f'sum by ({by}) (rate(ray_rayrft_{name}_total{{run=~"$run"}}[5m]))'


TAKEN, SCORED = rate("reward_seconds", "run, domain"), rate("reward_scored", "run, domain")
"""Seconds are 0 of a reward whose calls are not timed, and a counter has no series before it increases."""

Panel = tuple[str, str, str, dict[str, str]]
"""Title, unit, description and queries by legend."""

ALERTS = 'count by (alertname) (ALERTS{alertname=~"Rayrft.+", alertstate="firing", run=~"$run"}) or vector(0)'

ROWS: dict[str, list[Panel]] = {
    "rayrft: learning": [
        ("Reward", "none", "Mean over the answers sampled since the previous step.", {"{{run}}": either("reward")}),
        (
            "Accuracy",
            "percentunit",
            "Share of right answers to held-out tasks, with its 95 % interval, and pass@samples.",
            {
                "{{run}} T={{temperature}}": last("eval_accuracy", "run, temperature"),
                "{{run}} T={{temperature}} low": last("eval_low", "run, temperature"),
                "{{run}} T={{temperature}} high": last("eval_high", "run, temperature"),
                "{{run}} T={{temperature}} pass@samples": last("eval_passed", "run, temperature"),
            },
        ),
        (
            "Loss parts",
            "none",
            "Unweighted parts, before mu; the loss is their weighted sum.",
            {
                f"{{{{run}}}} {part}": last(f"train_{part.replace(' ', '_')}")
                for part in ("loss", "policy loss", "sft loss", "preference loss", "distillation loss", "value loss")
            },
        ),
        (
            "KL to the reference",
            "none",
            "Nats per token, and of labelled answers.",
            {"{{run}} kl": last("train_kl"), "{{run}} labelled": last("train_reference_kl")},
        ),
        ("Entropy", "none", "Nats per token.", {"{{run}}": last("train_entropy")}),
        (
            "Clipped tokens",
            "percentunit",
            "Share of tokens whose ratio the loss clips.",
            {"{{run}}": last("train_clip_fraction")},
        ),
        (
            "Gradient norm",
            "none",
            "Before clipping.",
            {"{{run}}": last("train_grad_norm"), "{{run}} critic": last("train_value_grad_norm")},
        ),
        (
            "Log-prob gap of engine and trainer",
            "none",
            "Nats per token: mean over the step's tokens, the accepted mean, and the largest gap of the latest probe.",
            {
                "{{run}} mean": last("train_logprob_gap"),
                "{{run}} accepted": last("limit_logprob_gap"),
                "{{run}} probe": last("train_probe_gap"),
            },
        ),
        (
            "Staleness",
            "none",
            "Versions between the oldest weights of a trained row and the trainer's.",
            {
                "{{run}} mean": last("train_staleness_mean"),
                "{{run}} largest": last("train_staleness_max"),
                "{{run}} limit": last("limit_staleness"),
            },
        ),
    ],
    "rayrft: time": [
        ("Tokens per second", "none", "", {"{{run}}": either("tokens_per_second")}),
        (
            "Time of a step",
            "s",
            "Stacked: the trainer waits for rows, trains, and sends its weights.",
            {f"{{{{run}}}} {part}": last(f"train_{part}_seconds") for part in ("wait", "train", "sync")},
        ),
        (
            "Time of the Explorer",
            "s",
            "Since the previous step, in which any rollout, scoring or verification was running; these overlap.",
            {f"{{{{run}}}} {part}": either(f"{part}_seconds") for part in ("rollout", "reward", "pipeline")},
        ),
        ("Weight sync", "s", "", {"{{run}}": last("train_sync_seconds")}),
        (
            "Tokens per answer",
            "none",
            "Mean over five minutes of sampling, and over the answers of an evaluation.",
            {
                "{{run}}": f"{rate('train_sampled_tokens')} / {rate('train_sampled_rows')}",
                "{{run}} evaluation T={{temperature}}": last("eval_mean_tokens", "run, temperature"),
            },
        ),
        (
            "Truncated answers",
            "percentunit",
            "Share of answers that reached max_tokens.",
            {
                "{{run}}": either("truncated_share"),
                "{{run}} evaluation T={{temperature}}": last("eval_cut_share", "run, temperature"),
            },
        ),
        (
            "Seconds per reward",
            "s",
            "Mean over five minutes, by domain.",
            {"{{run}} {{domain}}": f"({TAKEN} or 0 * {SCORED}) / {SCORED}"},
        ),
        (
            "Unknown rewards",
            "none",
            "Rewards that failed or came too late, and transcripts that wait for their reward.",
            {
                "{{run}} {{domain}} unknown": count("reward_unknown", "run, domain"),
                "{{run}} {{domain}} pending": last("reward_pending", "run, domain"),
            },
        ),
    ],
    "rayrft: rows and parts": [
        (
            "Ledger",
            "none",
            "Stacked: sampled = trained + dropped + held.",
            {
                "{{run}} trained": last("ledger_trained_rows"),
                "{{run}} dropped": 'sum by (run) (ray_rayrft_ledger_dropped_rows{run=~"$run"}) '
                f"or 0 * {last('ledger_held_rows')}",
                "{{run}} held": last("ledger_held_rows"),
            },
        ),
        (
            "Dropped rows by reason",
            "none",
            "",
            {
                "{{run}} {{reason}}": f"{last('ledger_dropped_rows', 'run, reason')} "
                f"or on (run) 0 * {last('ledger_held_rows')}"
            },
        ),
        (
            "Restarts by part",
            "none",
            "Actors that died and were replaced.",
            {"{{run}} {{part}}": count("restarts", "run, part")},
        ),
        ("Alerts that fire", "none", "cluster/prometheus/alerts.yml says what to do.", {"{{alertname}}": ALERTS}),
    ],
}
STACKED = "Time of a step", "Ledger"


def rows() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, with a row panel before those of each part."""
    found: list[dict[str, Any]] = []
    y = 0
    for row, panels in ROWS.items():
        found.append({"type": "row", "title": row, "collapsed": False, "gridPos": place(0, y, 24, 1), "panels": []})
        for number, panel in enumerate(panels):
            found.append(timeseries(*panel, place(WIDTH * (number % 3), y + 1 + HEIGHT * (number // 3), WIDTH, HEIGHT)))
        y += 1 + HEIGHT * -(-len(panels) // 3)
    return [{"id": FIRST_ID + number, **panel} for number, panel in enumerate(found)]


def place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def timeseries(title: str, unit: str, text: str, queries: dict[str, str], where: dict[str, int]) -> dict[str, Any]:
    """Return a panel of curves."""
    custom: dict[str, Any] = {"showPoints": "auto"}
    if title in STACKED:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(queries.items())
        ],
    }


DATASOURCES: dict[str, Any] = {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2}
RUN = {
    "name": "run",
    "label": "Run",
    "type": "query",
    "datasource": DATASOURCE,
    "query": {"query": "label_values(ray_rayrft_progress_timestamp_seconds, run)", "refId": "run"},
    "refresh": 2,
    "includeAll": True,
    "multi": True,
    "allValue": ".*",
    "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the model of Grafana."""
    return {
        "uid": "rayrft",
        "title": "rayrft runs",
        "tags": ["ray", "rayrft"],
        "schemaVersion": 36,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [DATASOURCES, RUN]},
        "annotations": {"list": []},
        "panels": rows(),
    }


def written(model: dict[str, Any]) -> str:
    """Return the JSON of a dashboard, with a line for each panel."""
    lines = ",\n".join(json.dumps(panel) for panel in model["panels"])
    others = json.dumps({key: value for key, value in model.items() if key != "panels"})
    return f'{others[:-1]}, "panels": [\n{lines}\n]}}\n'


def with_row(core: dict[str, Any]) -> dict[str, Any]:
    """Return a dashboard of Ray with the panels of runs in a closed row at its top. One that has it is unchanged."""
    if any(panel["id"] >= FIRST_ID for panel in core["panels"]):
        return core
    for each in core["panels"]:
        for panel in (each, *each.get("panels", ())):
            panel["gridPos"]["y"] += 1
    panels = [panel for panel in rows() if panel["type"] != "row"]
    row = {"id": FIRST_ID + 999, "type": "row", "title": "rayrft: runs", "collapsed": True, "panels": panels}
    core["panels"].insert(0, {**row, "gridPos": place(0, 0, 24, 1)})
    core["templating"]["list"].append(RUN)
    return core


def main() -> None:
    text = written(dashboard())
    (HERE / "rayrft.json").write_text(text)
    for folder in map(Path, sys.argv[1:]):
        core = folder / CORE
        if not core.is_file():
            sys.exit(f"{core} does not exist: start Ray with its dashboard, and give the folder of its dashboards")
        core.write_text(written(with_row(json.loads(core.read_text()))))
        (folder / "rayrft.json").write_text(text)


if __name__ == "__main__":
    main()
