"""The chart's values, schema and page agree with one another and with the services.

No helm is needed; what helm makes of the chart is checked by `make chart-check`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from octavo.metrics import Kind
from pydantic_settings import BaseSettings

from scheduler_svc.observation import definitions
from tests.support import chart
from tests.support.chart import CHART, CI_VALUES, ROOT, SERVICES, generator, references, templates

VARIABLE = re.compile(r"\bOCTAVO_(SCHEDULER|EXECUTOR|GATEWAY)_([A-Z_]+)\b")
OTHER_VARIABLE = re.compile(r"\bOCTAVO_(?!SCHEDULER_|EXECUTOR_|GATEWAY_)[A-Z_]+\b")
# How templates that serve several services name the values of one.
OF_A_SERVICE = (r"\$v", r"\$service", " ")


def leaves() -> list[Any]:
    return list(generator().read_values().leaves())


def settings(service: str) -> type[BaseSettings]:
    return generator().SERVICES[service]


def all_templates() -> str:
    return "\n".join(templates().values())


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda match: "_" + match[0].lower(), name)


# -- what is generated -----------------------------------------------------------------


def test_generated_files_are_fresh(tmp_path: Path) -> None:
    """After a change of values, settings, dashboard or rules: `make chart`."""
    generator().main(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 4
    stale = [
        str(name) for name in made if (tmp_path / name).read_text() != (CHART / name).read_text()
    ]
    assert stale == []


def test_every_value_is_documented() -> None:
    """No value without a sentence."""
    assert len(leaves()) > 100
    assert [value.name for value in leaves() if not value.doc.endswith((".", ")"))] == []


def test_every_value_is_on_the_page() -> None:
    """README.md has a row for each."""
    page = (CHART / "README.md").read_text(encoding="utf-8")
    assert [value.name for value in leaves() if f"| `{value.name}` |" not in page] == []


# -- templates against values ----------------------------------------------------------


def test_every_value_is_used_by_a_template() -> None:
    """Named in full, or within a group that is handed on whole."""
    named = set(references(all_templates()))
    shared = {name for of in OF_A_SERVICE for name in references(all_templates(), of)}

    def is_used(path: tuple[str, ...]) -> bool:
        if path[0] in SERVICES and ".".join(path[1:]) in shared:
            return True
        # A service as a whole says nothing about any value of it.
        shortest = 2 if path[0] in SERVICES else 1
        return any(".".join(path[:end]) in named for end in range(shortest, len(path) + 1))

    def is_read_by_keys(value: Any) -> bool:
        keys = (value.schema or {}).get("properties", ())
        return any(f"{value.name}.{key}" in named for key in keys)

    assert [v.name for v in leaves() if not (is_used(v.path) or is_read_by_keys(v))] == []


def test_templates_read_only_values_that_exist() -> None:
    """A misspelt name would be empty, silently."""
    known = {
        ".".join(value.path[:end]) for value in leaves() for end in range(1, len(value.path) + 1)
    }
    # What a map may hold that is empty by default is in its schema.
    known |= {
        f"{value.name}.{key}"
        for value in leaves()
        for key in (value.schema or {}).get("properties", ())
    }
    assert [name for name in references(all_templates()) if name not in known] == []


def test_templates_name_variables_of_settings_that_exist() -> None:
    """A misspelt variable would be ignored, silently."""
    # A bare prefix is put before the names of settings.
    found = [(service, name) for service, name in VARIABLE.findall(all_templates()) if name]
    assert len(found) > 20
    wrong = [
        f"OCTAVO_{service}_{name}"
        for service, name in found
        if name.lower() not in settings(service.lower()).model_fields
    ]
    assert wrong == []


def test_templates_name_variables_that_the_code_reads() -> None:
    """Those that are no service's own, such as OCTAVO_MODEL_STORE."""
    folders = ("clients/python", "executor_svc", "scheduler_svc")
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    )
    found = set(OTHER_VARIABLE.findall(all_templates()))
    assert found
    assert {name for name in found if f'"{name}"' not in code} == set()


@pytest.mark.parametrize("service", SERVICES)
def test_the_chart_accounts_for_every_setting(service: str) -> None:
    """Each is a key of the service's config, or the chart sets it itself."""
    own = generator().CHART_SETS[service]
    fields = set(settings(service).model_fields)
    assert own <= fields
    assert {snake(key) for key in generator().settings_of(service)} == fields - own


@pytest.mark.parametrize("service", SERVICES)
def test_variables_that_the_chart_sets_are_those_it_keeps_for_itself(service: str) -> None:
    """A user's config and the chart never set the same variable, but for one default."""
    found = {
        name.lower() for of, name in VARIABLE.findall(all_templates()) if of.lower() == service
    }
    assert found - generator().CHART_SETS[service] <= {"", "num_threads"}


def test_scaling_asks_for_metrics_that_exist() -> None:
    """With labels that they have."""
    text = templates()["executor-autoscaler.yaml"]
    metrics = {metric.name: metric for metric in definitions.METRICS}
    found = re.findall(r"\b(octavo_\w+)\{([^}]*(?:\}\}[^}]*)?)\}", text)
    assert len(found) == 3
    for series, selector in found:
        metric = metrics[series.removesuffix("_bucket")]
        assert series.endswith("_bucket") == (metric.kind is Kind.HISTOGRAM)
        assert set(re.findall(r"(\w+)=", selector)) <= {"job", *metric.labels}


# -- the schema ------------------------------------------------------------------------


def merged(file: Path) -> dict[str, Any]:
    """The defaults under a file of values, as helm merges them."""

    def merge(under: Any, over: Any) -> Any:
        if not (isinstance(under, dict) and isinstance(over, dict)):
            return over
        keys = {**under, **over}
        return {
            key: merge(under[key], over[key]) if key in under and key in over else keys[key]
            for key in keys
        }

    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    result: dict[str, Any] = merge(defaults, yaml.safe_load(file.read_text(encoding="utf-8")))
    return result


@pytest.mark.parametrize("file", CI_VALUES, ids=lambda file: file.stem)
def test_example_values_are_valid(file: Path) -> None:
    """As the services judge their own settings; helm judges the rest by the schema."""
    values = merged(file)
    for service in SERVICES:
        given = {snake(key): value for key, value in values[service]["config"].items()}
        read = settings(service)(**given)
        assert {name: getattr(read, name) for name in given} == given


def test_no_object_of_the_schema_takes_anything() -> None:
    """Each refuses keys that it does not know, or says what it takes."""

    def objects(schema: Any, path: str) -> list[str]:
        if not isinstance(schema, dict):
            return []
        found = [path] if schema.get("type") == "object" and not is_bound(schema) else []
        for key, child in schema.get("properties", {}).items():
            found += objects(child, f"{path}.{key}")
        return found

    def is_bound(schema: dict[str, Any]) -> bool:
        others = schema.get("additionalProperties", True)
        return others is False or (isinstance(others, dict) and "type" in others)

    # Objects of Kubernetes' own, which its server judges.
    kubernetes = re.compile(r"\.(requests|limits|(node|pod|podAnti)Affinity)$|^\.global$")
    assert [path for path in objects(chart.schema(), "") if not kubernetes.search(path)] == []


def test_every_number_of_the_schema_is_bounded() -> None:
    """Below, always; above, too, where the chart has the say."""
    unbounded = []
    for value in leaves():
        if value.service or isinstance(value.default, bool):
            continue
        if isinstance(value.default, int | float):
            bounds = set(value.schema or {})
            if not (bounds & {"minimum", "exclusiveMinimum"} and bounds & {"maximum"}):
                unbounded.append(value.name)
    assert unbounded == []
