# cdr serve in a container: a checkout is built in one stage and runs, without its compiler, as nobody in the next.
FROM python:3.12-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# PyPI's torch brings gigabytes of CUDA that a server on CPUs has no use for.
RUN python -m venv /opt/cdr \
 && /opt/cdr/bin/pip install --no-cache-dir -c constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu" ".[serve,redis,otel]"

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home cdr
COPY --from=build /opt/cdr /opt/cdr
ENV PATH=/opt/cdr/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /tmp
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/readyz', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["cdr", "serve"]
CMD ["/store", "--host", "0.0.0.0", "--keys", "/run/secrets/keys"]
