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
{{- $limits := (include "kproxy.settings" . | fromJson).limits }}
{{- add (ceil $limits.drain_delay) (ceil (default 10 $limits.drain_s)) 20 }}
{{- end }}

{{/* Whether the admin page has TLS: empty if not. */}}
{{- define "kproxy.adminTls" -}}
{{- dig "admin" "tls" "cert" "" .Values.config }}
{{- end }}

{{/* The port in `host:port`. */}}
{{- define "kproxy.portOf" -}}
{{- splitList ":" . | last }}
{{- end }}

{{/* The port of the admin page. */}}
{{- define "kproxy.adminPort" -}}
{{- include "kproxy.portOf" (include "kproxy.settings" . | fromJson).listen.admin }}
{{- end }}

{{/* The ports that clients connect to, by the name of each, as JSON: the first one is `kafka`, others have their number. */}}
{{- define "kproxy.kafkaPorts" -}}
{{- $settings := include "kproxy.settings" . | fromJson }}
{{- $ports := list }}
{{- range default (list $settings.listen) $settings.listeners }}
{{- $ports = append $ports (int (include "kproxy.portOf" .listen)) }}
{{- end }}
{{- $named := list }}
{{- range $index, $port := uniq $ports }}
{{- $named = append $named (dict "name" (ternary "kafka" (printf "kafka-%d" $port) (eq $index 0)) "port" $port) }}
{{- end }}
{{- toJson $named }}
{{- end }}

{{/* Where clients outside of the cluster get to. */}}
{{- define "kproxy.externalPort" -}}
{{- $port := "kafka" }}
{{- range .Values.config.listeners }}
{{- if eq .name $.Values.external.listener }}
{{- $port = include "kproxy.portOf" .listen }}
{{- end }}
{{- end }}
{{- $port }}
{{- end }}

{{/* What clients are told, as `--advertise` takes it. */}}
{{- define "kproxy.advertise" -}}
{{- $inner := printf "$(POD_NAME).%s-headless.%s.svc.%s" (include "kproxy.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- $outer := printf "$(POD_NAME).%s:%d" .Values.external.domain (int .Values.external.port) }}
{{- $told := list }}
{{- $settings := include "kproxy.settings" . | fromJson }}
{{- range default (list $settings.listen) $settings.listeners }}
{{- $isOuter := and $.Values.external.enabled (eq $.Values.external.listener (default "" .name)) }}
{{- $address := default (ternary $outer (printf "%s:%s" $inner (include "kproxy.portOf" .listen)) $isOuter) .advertise }}
{{- $told = append $told (empty .name | ternary $address (printf "%s=%s" .name $address)) }}
{{- end }}
{{- join "," $told }}
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
{{- $names := list }}
{{- range .Values.config.listeners }}
{{- $names = append $names (required "config.listeners: each needs a name" .name) }}
{{- $_ := required "config.listeners: each needs listen, its address" .listen }}
{{- end }}
{{- if and .Values.external.enabled $names (not (has .Values.external.listener $names)) }}
{{- fail "external.listener: name the one of config.listeners that clients outside of the cluster connect to" }}
{{- end }}
{{- range concat .Values.extraEnv .Values.test.env }}
{{- if and (regexMatch "^KPROXY_.*__(PASSWORD|TOKEN)$" .name) .value }}
{{- fail (printf "%s: a secret stands in a Secret alone: give it by valueFrom.secretKeyRef" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the chart writes into the configuration file, by table and key, as YAML. */}}
{{- define "kproxy.ownSettings" -}}
listen:
  {{- if not .Values.config.listeners }}
  listen: {{ printf "%s:%d" (ternary .Values.listenHost "127.0.0.1" (eq .Values.mode "gateway")) (int .Values.ports.kafka) | quote }}
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
{{- end }}
limits:
  # While clients learn that a gateway's pod goes, and Services let go of it. A sidecar's application has ended by then.
  drain_delay: {{ ternary 5 0 (eq .Values.mode "gateway") }}
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

{{/* The configuration, by table and key, as JSON. */}}
{{- define "kproxy.settings" -}}
{{- mergeOverwrite (include "kproxy.ownSettings" . | fromYaml) (deepCopy .Values.config) | toJson }}
{{- end }}

{{/* The configuration file. */}}
{{- define "kproxy.toml" -}}
{{- include "kproxy.validate" . }}
{{- $settings := include "kproxy.settings" . | fromJson }}
{{- if eq .Values.mode "gateway" }}
{{- range append (default list $settings.listeners) $settings.listen }}
{{- $_ := unset . "advertise" }}
{{- end }}
{{- end }}
{{- range $table, $content := $settings }}
{{- if and (kindIs "slice" $content) (not $content) }}
{{ $table }} = []
{{- end }}
{{- end }}
{{- range $table, $content := $settings }}
{{- if kindIs "slice" $content }}
{{- range $content }}
[[{{ $table }}]]
{{- include "kproxy.keys" (dict "table" $table "before" "" "keys" .) }}
{{ end }}
{{- else }}
[{{ $table }}]
{{- include "kproxy.keys" (dict "table" $table "before" "" "keys" $content) }}
{{ end }}
{{- end }}
{{- end }}

{{/*
Lines of a table. JSON's scalars and lists are TOML's as well; toToml would make floats of whole numbers. A map is a file
in a Secret, or has more keys, which then have `before` before them.
*/}}
{{- define "kproxy.keys" -}}
{{- range $key, $value := .keys }}
{{- $name := print $.before $key }}
{{- if has $key (list "password" "token") }}
{{- fail (printf "config.%[1]s.%[2]s: a secret stands in a Secret alone: name that in config.%[1]s.%[2]s_file, as secretName and key" $.table $name) }}
{{- else if not (kindIs "map" $value) }}
{{ $name }} = {{ toJson $value }}
{{- else if $value.secretName }}
{{ $name }} = {{ printf "/etc/kproxy-secrets/%s/%s" $value.secretName $value.key | toJson }}
{{- else }}
{{- include "kproxy.keys" (dict "table" $.table "before" (print $name ".") "keys" $value) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The files in Secrets that the configuration names, each as SECRET/KEY in a line. */}}
{{- define "kproxy.secretFiles" -}}
{{- if kindIs "slice" . }}
{{- range . }}
{{- include "kproxy.secretFiles" . }}
{{- end }}
{{- else if kindIs "map" . }}
{{- if .secretName }}
{{ .secretName }}/{{ .key }}
{{- else }}
{{- include "kproxy.secretFiles" (values .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kproxy.volumes" -}}
- name: kproxy-config
  {{- if .Values.configSecretName }}
  secret:
    secretName: {{ .Values.configSecretName }}
  {{- else }}
  configMap:
    name: {{ include "kproxy.fullname" . }}
  {{- end }}
{{- with include "kproxy.secretFiles" .Values.config | splitList "\n" | compact | uniq | sortAlpha }}
- name: kproxy-secrets
  projected:
    {{- if and (eq $.Values.mode "gateway") $.Values.podSecurityContext.fsGroup }}
    # By the group: a file of users that everybody may read is refused.
    defaultMode: 0440
    {{- end }}
    sources:
      {{- range . }}
      - secret:
          name: {{ dir . }}
          items:
            - key: {{ base . }}
              path: {{ . }}
      {{- end }}
{{- end }}
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
    - --advertise={{ include "kproxy.advertise" . }}
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
    {{- range include "kproxy.kafkaPorts" . | fromJsonArray }}
    - name: {{ .name }}
      containerPort: {{ .port }}
    {{- end }}
    - name: admin
      containerPort: {{ include "kproxy.adminPort" . }}
    {{- else }}
    - name: kproxy-admin
      containerPort: {{ include "kproxy.adminPort" . }}
    {{- end }}
  {{- if eq .Values.mode "sidecar" }}
  # The application is started when the proxy serves.
  startupProbe:
    httpGet:
      path: /readyz
      port: {{ include "kproxy.adminPort" . }}
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
      port: {{ include "kproxy.adminPort" . }}
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
      port: {{ include "kproxy.adminPort" . }}
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
    {{- if include "kproxy.secretFiles" .Values.config }}
    - name: kproxy-secrets
      mountPath: /etc/kproxy-secrets
      readOnly: true
    {{- end }}
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
