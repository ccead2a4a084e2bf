# The OpenTelemetry collector, whose image holds one program and no shell, and a program that its
# health check can run.
ARG OTEL_COLLECTOR_IMAGE=otel/opentelemetry-collector:0.162.0
ARG BUSYBOX_IMAGE=busybox:1.37.0-musl
FROM ${BUSYBOX_IMAGE} AS busybox
FROM ${OTEL_COLLECTOR_IMAGE}
COPY --from=busybox /bin/busybox /bin/busybox
