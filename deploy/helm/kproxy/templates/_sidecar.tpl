{{/*
For charts of applications that have kproxy as a dependency, with `mode: sidecar`:

    spec:
      initContainers:
        {{- include "kproxy.sidecar" .Subcharts.kproxy | nindent 8 }}
      volumes:
        {{- include "kproxy.sidecar.volumes" .Subcharts.kproxy | nindent 8 }}

The application's bootstrap server is 127.0.0.1:9092 then (`ports.kafka`).
*/}}
{{- define "kproxy.sidecar" -}}
{{- if ne .Values.mode "sidecar" }}
{{- fail "kproxy.sidecar: set kproxy.mode to sidecar" }}
{{- end }}
{{- include "kproxy.container" . }}
{{- end }}

{{- define "kproxy.sidecar.volumes" -}}
{{- include "kproxy.volumes" . }}
{{- end }}

{{/* Labels for the application's pods, by which the PodMonitor finds the sidecar. */}}
{{- define "kproxy.sidecar.labels" -}}
kproxy/sidecar: {{ include "kproxy.fullname" . }}
{{- end }}
