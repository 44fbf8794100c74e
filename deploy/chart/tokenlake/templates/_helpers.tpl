{{- define "tokenlake.name" -}}
{{- if contains "tokenlake" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-tokenlake{{ end -}}
{{- end }}

{{- define "tokenlake.selector" -}}
app.kubernetes.io/name: tokenlake
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tokenlake.labels" -}}
{{ include "tokenlake.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Pods that have a daemon, and so listen at its ports. */}}
{{- define "tokenlake.daemons" -}}
{{ include "tokenlake.selector" . }}
tokenlake/daemon: "true"
{{- end }}

{{- define "tokenlake.engineName" -}}
{{ include "tokenlake.name" . }}-engine
{{- end }}

{{- define "tokenlake.engines" -}}
{{ include "tokenlake.selector" . }}
app.kubernetes.io/component: engine
{{- end }}

{{/* A size of the settings (64GiB, or bytes) in bytes. */}}
{{- define "tokenlake.bytes" -}}
{{- $text := . | toString -}}
{{- $number := regexFind "^[0-9]+" $text | int64 -}}
{{- $unit := regexFind "[KMGT]iB$" $text -}}
{{- $factor := dict "" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- mul $number (get $factor $unit | int64) -}}
{{- end }}

{{/* Memory of the daemon's container in MiB: `memory`; 200 MiB, and 2 KiB for each segment; 400 MiB for a query engine;
     commands that are run in the container; and the volume for temporary files, which lies in memory. */}}
{{- define "tokenlake.mebibytes" -}}
{{- $mib := int64 1048576 -}}
{{- $memory := include "tokenlake.bytes" .Values.memory | int64 -}}
{{- $segments := div $memory (include "tokenlake.bytes" .Values.smallestSegment | int64) -}}
{{- $beyond := add (mul 200 $mib) (mul 2048 $segments) (include "tokenlake.bytes" .Values.daemon.commands | int64) $mib -}}
{{- if .Values.settings.query_engine }}{{ $beyond = add $beyond (mul 400 $mib) }}{{ end -}}
{{- $bytes := add $beyond (ternary 0 $memory (.Values.settings.huge_pages | default false)) -}}
{{- div (add $bytes (sub $mib 1)) $mib -}}
{{- end }}

{{/* The names of the nodes that the chart knows. */}}
{{- define "tokenlake.nodes" -}}
{{- $nodes := .Values.certificates.nodes -}}
{{- if eq .Values.mode "sidecar" -}}
{{- $nodes = list -}}
{{- range $at := until (int .Values.engine.replicas) }}{{ $nodes = append $nodes (printf "%s-%d" (include "tokenlake.engineName" $) $at) }}{{ end -}}
{{- end -}}
{{- $nodes | toJson -}}
{{- end }}

{{/* Not empty where the nodes form a cluster. */}}
{{- define "tokenlake.clustered" -}}
{{- if or .Values.etcd.endpoints (and (eq .Values.mode "sidecar") (gt (int .Values.engine.replicas) 1)) }}yes{{ end -}}
{{- end }}

{{- define "tokenlake.encrypted" -}}
{{- if and (include "tokenlake.clustered" .) (not .Values.unencrypted) }}yes{{ end -}}
{{- end }}

{{/* Values that contradict each other. */}}
{{- define "tokenlake.check" -}}
{{- if and (include "tokenlake.encrypted" .) (not (include "tokenlake.nodes" . | fromJsonArray)) -}}
{{- fail "certificates.nodes: name the machines of the DaemonSet, or set 'unencrypted' to true" -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") (not .Values.engine.enabled) -}}
{{- fail "mode: a sidecar needs an engine: set 'engine.enabled' to true, or see docs/operations/containers.md for a pod of your own" -}}
{{- end -}}
{{- if and .Values.engine.enabled (not .Values.engine.model) -}}
{{- fail "engine.model: name the model that the engines serve" -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") .Values.engine.autoscaling.enabled -}}
{{- fail "engine.autoscaling: not with sidecars, whose certificates and members follow from 'engine.replicas'" -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") (or .Values.disk.path .Values.socket.persistentVolume) -}}
{{- fail "disk.path and socket.persistentVolume: of a DaemonSet only" -}}
{{- end -}}
{{- end }}

{{- define "tokenlake.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tokenlake.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
fsGroup: {{ int64 .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "tokenlake.restricted" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: more than drain_s + disk_save_s + 20. */}}
{{- define "tokenlake.grace" -}}
{{- $save := ternary .Values.settings.disk_save_s 10 (hasKey .Values.settings "disk_save_s") | float64 | ceil | int -}}
{{- add $save 30 (ternary .Values.drainSeconds 0 (not (empty .Values.etcd.endpoints))) -}}
{{- end }}

{{/* A value as the settings of the daemon are written. Helm reads whole numbers as floats, and shows 1000650000 as
     1.00065e+09. */}}
{{- define "tokenlake.text" -}}
{{- if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . }}{{ $items = append $items (include "tokenlake.text" .) }}{{ end -}}
{{- join "," $items -}}
{{- else if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . | toString -}}
{{- end -}}
{{- end }}
