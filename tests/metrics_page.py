"""Reads a page of metrics as Prometheus does."""

from prometheus_client.parser import text_string_to_metric_families


class MetricsPage:
    """The samples of one page."""

    def __init__(self, text: str) -> None:
        self.families = {}
        """Kind and meaning by name; a counter's ends in _total."""
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            self.families[name] = (family.type, family.documentation)
            self._samples += [(each.name, each.labels, each.value) for each in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples of that name with these labels, among others."""
        return sum(
            value
            for each, given, value in self._samples
            if each == name and labels.items() <= given.items()
        )

    def labels(self, name: str, label: str) -> set[str]:
        """Returns the values of a label."""
        return {given[label] for each, given, _ in self._samples if each == name}

    def label_names(self, name: str) -> set[str]:
        """Returns the labels of a family's samples, but for those of buckets and workers."""
        names = {name, f"{name}_count"}
        found = [set(given) for each, given, _ in self._samples if each in names]
        return set().union(*found) - {"worker"}
