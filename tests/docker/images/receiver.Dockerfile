# Stands in for the OpenTelemetry collector: kvturn's own receiver writes what comes to a file, and
# something answers where the collector's health is asked for. The flags of the command are ignored.
ARG KVTURN_IMAGE
FROM ${KVTURN_IMAGE}
ENTRYPOINT ["sh", "-c", "python -m http.server --directory /opt/kvturn/bin 13133 >/dev/null 2>&1 & exec kvturn otlp --host 0.0.0.0 --file /dev/shm/traces.jsonl"]
