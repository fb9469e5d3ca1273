{{- define "kproxy.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" }}
{{- end }}

{{/* Short enough for "-headless" and a pod's ordinal behind it. */}}
{{- define "kproxy.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "kproxy.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kproxy.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kproxy.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kproxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kproxy.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kproxy.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kproxy.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}
{{- end }}

{{- define "kproxy.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "kproxy.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: both of the proxy's own times, last bytes (5), the audit trail (5), and room. */}}
{{- define "kproxy.gracePeriod" -}}
{{- add (ceil (dig "limits" "drain_delay" 0 .Values.config)) (ceil (dig "limits" "drain_s" 10 .Values.config)) 20 }}
{{- end }}

{{/* Whether the admin page has TLS: empty if not. */}}
{{- define "kproxy.adminTls" -}}
{{- dig "admin" "tls" "cert" "" .Values.config }}
{{- end }}

{{/* What no schema can say. */}}
{{- define "kproxy.validate" -}}
{{- if and (eq .Values.ownership.source "etcd") (not .Values.etcd.endpoints) }}
{{- fail "ownership.source etcd: give etcd.endpoints, the URLs of all members" }}
{{- end }}
{{- if and (eq .Values.ownership.source "kafka") (not .Values.ownership.bootstrap) }}
{{- fail "ownership.source kafka: give ownership.bootstrap, some of the cluster's brokers" }}
{{- end }}
{{- if and (eq .Values.mode "gateway") (gt (int .Values.replicas) 1) (not .Values.etcd.endpoints) }}
{{- fail "several replicas know of each other by an etcd: give etcd.endpoints, or replicas 1" }}
{{- end }}
{{- if and .Values.external.enabled (not .Values.external.domain) }}
{{- fail "external.enabled: give external.domain; clients are told POD.DOMAIN" }}
{{- end }}
{{- if and (include "kproxy.adminTls" .) (dig "admin" "tls" "client_ca" "" .Values.config) (ne "optional" (dig "admin" "tls" "client_auth" "required" .Values.config)) }}
{{- fail "config.admin.tls.client_ca: the kubelet has no certificate to show to probes: set config.admin.tls.client_auth to optional" }}
{{- end }}
{{- if and .Values.etcd.auth.username (not .Values.etcd.auth.secretName) }}
{{- fail "etcd.auth.username: give etcd.auth.secretName, the Secret with the password" }}
{{- end }}
{{- end }}

{{/* What the chart writes into the configuration file, by table and key, as YAML. */}}
{{- define "kproxy.settings" -}}
listen:
  {{- if eq .Values.mode "gateway" }}
  listen: {{ printf "%s:%d" .Values.listenHost (int .Values.ports.kafka) | quote }}
  {{- else }}
  listen: {{ printf "127.0.0.1:%d" (int .Values.ports.kafka) | quote }}
  {{- end }}
  admin: {{ printf "%s:%d" .Values.listenHost (int .Values.ports.admin) | quote }}
  workers: {{ int .Values.workers }}
ownership:
  ownership: {{ .Values.ownership.source }}
  {{- if eq .Values.ownership.source "kafka" }}
  bootstrap: {{ toJson .Values.ownership.bootstrap }}
  {{- end }}
  {{- with .Values.etcd.endpoints }}
  etcd: {{ toJson . }}
  prefix: {{ $.Values.etcd.prefix | quote }}
  {{- end }}
{{- if eq .Values.mode "sidecar" }}
fleet:
  alone: true
limits:
  # The application has ended by then: nobody else is to learn of it.
  drain_delay: 0
{{- end }}
{{- with .Values.etcd }}
{{- if or .tls.secretName .auth.username }}
etcd:
  {{- if .tls.secretName }}
  ca: /etc/kproxy-etcd/tls/ca.crt
  {{- if .tls.clientCertificate }}
  cert: /etc/kproxy-etcd/tls/tls.crt
  key: /etc/kproxy-etcd/tls/tls.key
  {{- end }}
  {{- with .tls.serverName }}
  server_name: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- with .auth.username }}
  username: {{ . | quote }}
  password_file: /etc/kproxy-etcd/auth/{{ $.Values.etcd.auth.secretKey }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The configuration file. JSON's scalars and lists are TOML's as well; toToml would make floats of whole numbers. */}}
{{- define "kproxy.toml" -}}
{{- include "kproxy.validate" . }}
{{- $given := deepCopy .Values.config }}
{{- if and (eq .Values.mode "sidecar") $given.limits }}
{{- $_ := unset $given.limits "drain_delay" }}
{{- end }}
{{- $settings := mergeOverwrite (include "kproxy.settings" . | fromYaml) $given }}
{{- range $table, $keys := $settings }}
[{{ $table }}]
{{- range $key, $value := $keys }}
{{- if kindIs "map" $value }}
{{- range $inner, $it := $value }}
{{ $key }}.{{ $inner }} = {{ toJson $it }}
{{- end }}
{{- else }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end }}

{{- define "kproxy.volumes" -}}
- name: kproxy-config
  configMap:
    name: {{ include "kproxy.fullname" . }}
{{- with .Values.etcd.tls.secretName }}
- name: kproxy-etcd-tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.etcd.auth.secretName }}
- name: kproxy-etcd-auth
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The container, of a gateway or of a sidecar. */}}
{{- define "kproxy.container" -}}
- name: kproxy
  image: {{ include "kproxy.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if eq .Values.mode "sidecar" }}
  restartPolicy: Always
  {{- end }}
  args:
    - serve
    - --config=/etc/kproxy/kproxy.toml
    {{- if eq .Values.mode "gateway" }}
    {{- if .Values.external.enabled }}
    - --advertise=$(POD_NAME).{{ .Values.external.domain }}:{{ .Values.external.port }}
    {{- else }}
    - --advertise=$(POD_NAME).{{ include "kproxy.fullname" . }}-headless.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:{{ .Values.ports.kafka }}
    {{- end }}
    {{- end }}
  {{- if or (eq .Values.mode "gateway") .Values.extraEnv }}
  env:
    {{- if eq .Values.mode "gateway" }}
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    {{- if eq .Values.mode "gateway" }}
    - name: kafka
      containerPort: {{ .Values.ports.kafka }}
    - name: admin
      containerPort: {{ .Values.ports.admin }}
    {{- else }}
    - name: kproxy-admin
      containerPort: {{ .Values.ports.admin }}
    {{- end }}
  {{- if eq .Values.mode "sidecar" }}
  # The application is started when the proxy serves.
  startupProbe:
    httpGet:
      path: /readyz
      port: {{ .Values.ports.admin }}
      {{- if include "kproxy.adminTls" . }}
      scheme: HTTPS
      {{- end }}
    periodSeconds: 2
    timeoutSeconds: 3
    failureThreshold: 300
  {{- else }}
  readinessProbe:
    httpGet:
      path: /readyz
      port: {{ .Values.ports.admin }}
      {{- if include "kproxy.adminTls" . }}
      scheme: HTTPS
      {{- end }}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  {{- end }}
  # Never on /readyz: no restart brings back brokers or an etcd.
  livenessProbe:
    httpGet:
      path: /livez
      port: {{ .Values.ports.admin }}
      {{- if include "kproxy.adminTls" . }}
      scheme: HTTPS
      {{- end }}
    initialDelaySeconds: 10
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  {{- with .Values.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.securityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: kproxy-config
      mountPath: /etc/kproxy
      readOnly: true
    {{- if .Values.etcd.tls.secretName }}
    - name: kproxy-etcd-tls
      mountPath: /etc/kproxy-etcd/tls
      readOnly: true
    {{- end }}
    {{- if .Values.etcd.auth.secretName }}
    - name: kproxy-etcd-auth
      mountPath: /etc/kproxy-etcd/auth
      readOnly: true
    {{- end }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
