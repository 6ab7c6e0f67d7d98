"""The queries of the dashboard, of the alerts and of docs/METRICS.md, each by its title."""

from __future__ import annotations

import json
import re

import yaml

from .prometheus import DEPLOY

DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
PANELS: dict[str, str] = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}

_RULES = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))
ALERTS: dict[str, str] = {rule["alert"]: rule["expr"] for group in _RULES["groups"] for rule in group["rules"]}

_METRICS = (DEPLOY.parent / "METRICS.md").read_text(encoding="utf-8")
(_examples,) = re.findall(r"^## Queries\n\n```\n(.*?)\n```$", _METRICS, re.DOTALL | re.MULTILINE)
EXAMPLES = dict(each.removeprefix("# ").split("\n", 1) for each in _examples.split("\n\n"))


def as_sent(query: str) -> str:
    """Return a query as Grafana sends it when all servers are selected."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".*")
