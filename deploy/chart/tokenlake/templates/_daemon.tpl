{{/* The environment of the daemon. A variable is used by others below it only. */}}
{{- define "tokenlake.env" -}}
{{- $v6 := eq .Values.ipFamily "IPv6" -}}
{{- $any := ternary "[::]" "0.0.0.0" $v6 -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: TOKENLAKE_NODE
  valueFrom:
    fieldRef:
      fieldPath: {{ ternary "metadata.name" "spec.nodeName" (eq .Values.mode "sidecar") }}
- name: TOKENLAKE_MEMORY
  value: {{ .Values.memory | toString | quote }}
- name: TOKENLAKE_CLUSTER
  value: {{ .Values.cluster }}
- name: TOKENLAKE_SOCKET
  value: /run/tokenlake/tokenlake-local.sock
- name: TOKENLAKE_METRICS
  value: {{ printf "%s:7441" $any | quote }}
{{- if include "tokenlake.clustered" . }}
- name: TOKENLAKE_LISTEN
  value: {{ printf "%s:7440" $any | quote }}
{{- if .Values.etcd.endpoints }}
- name: TOKENLAKE_ADVERTISE
  value: {{ ternary "[$(POD_IP)]:7440" "$(POD_IP):7440" $v6 | quote }}
- name: TOKENLAKE_ETCD
  value: {{ join "," .Values.etcd.endpoints | quote }}
- name: TOKENLAKE_DRAIN_S
  value: {{ int64 .Values.drainSeconds | quote }}
{{- with .Values.etcd.user }}
- name: TOKENLAKE_ETCD_USER
  value: {{ . | quote }}
{{- end }}
{{- if .Values.etcd.secret }}
- name: TOKENLAKE_ETCD_CA
  value: /etc/tokenlake/etcd/ca.crt
{{- if .Values.etcd.clientCertificate }}
- name: TOKENLAKE_ETCD_CERTIFICATE
  value: /etc/tokenlake/etcd/tls.crt
- name: TOKENLAKE_ETCD_KEY
  value: /etc/tokenlake/etcd/tls.key
{{- end }}
{{- end }}
{{- else }}
- name: TOKENLAKE_ADVERTISE
  value: "$(TOKENLAKE_NODE).{{ include "tokenlake.name" . }}.{{ .Release.Namespace }}.svc:7440"
- name: TOKENLAKE_PEERS
  value: "
  {{- range $at, $node := include "tokenlake.nodes" . | fromJsonArray }}
  {{- if $at }},{{ end }}{{ $node }}={{ $node }}.{{ include "tokenlake.name" $ }}.{{ $.Release.Namespace }}.svc:7440
  {{- end }}"
{{- end }}
{{- if include "tokenlake.encrypted" . }}
- name: TOKENLAKE_CERTIFICATE
  value: /etc/tokenlake/certificates/$(TOKENLAKE_NODE)/tls.crt
- name: TOKENLAKE_KEY
  value: /etc/tokenlake/certificates/$(TOKENLAKE_NODE)/tls.key
- name: TOKENLAKE_CA
  value: /etc/tokenlake/certificates/$(TOKENLAKE_NODE)/ca.crt
- name: TOKENLAKE_CONTROL
  value: {{ printf "%s:7442" $any | quote }}
{{- else }}
- name: TOKENLAKE_UNENCRYPTED_BEYOND_LOOPBACK
  value: "true"
{{- end }}
{{- end }}
{{- if .Values.disk.path }}
- name: TOKENLAKE_DISK
  value: "/var/lib/tokenlake/disk{{ with .Values.disk.size }}:{{ . }}{{ end }}"
- name: TOKENLAKE_STATE_DIRECTORY
  value: /var/lib/tokenlake/disk
{{- end }}
{{- range $name, $value := .Values.settings }}
- name: TOKENLAKE_{{ upper $name }}
  value: {{ include "tokenlake.text" $value | quote }}
{{- end }}
{{- range .Values.secretSettings }}
- name: TOKENLAKE_{{ upper .setting }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}
{{- end }}

{{- define "tokenlake.container" -}}
name: tokenlake
image: {{ include "tokenlake.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - serve
  {{- if .Values.configSecret }}
  - --config=/etc/tokenlake/config/tokenlake.toml
  {{- end }}
env:
  {{- include "tokenlake.env" . | nindent 2 }}
ports:
  - {name: peers, containerPort: 7440}
  - {name: metrics, containerPort: 7441}
  - {name: control, containerPort: 7442}
resources:
  requests:
    cpu: {{ .Values.daemon.cpu | quote }}
    memory: {{ include "tokenlake.mebibytes" . }}Mi
    {{- with .Values.daemon.resources }}{{ toYaml . | nindent 4 }}{{ end }}
  limits:
    memory: {{ include "tokenlake.mebibytes" . }}Mi
    {{- with .Values.daemon.resources }}{{ toYaml . | nindent 4 }}{{ end }}
{{- if eq .Values.mode "daemonset" }}
# The page answers while the memory is prepared, so that this fits any memory.
startupProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 1
  timeoutSeconds: 3
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /ready, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
# A restart loses the segments in memory. {{ if eq .Values.mode "sidecar" }}The engine neither waits for the daemon nor depends on it.{{ end }}
livenessProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
securityContext:
  {{- include "tokenlake.restricted" . | nindent 2 }}
  readOnlyRootFilesystem: true
volumeMounts:
  - {name: socket, mountPath: /run/tokenlake}
  - {name: temporary, mountPath: /tmp}
  {{- if .Values.configSecret }}
  - {name: config, mountPath: /etc/tokenlake/config, readOnly: true}
  {{- end }}
  {{- if include "tokenlake.encrypted" . }}
  - {name: certificates, mountPath: /etc/tokenlake/certificates, readOnly: true}
  {{- end }}
  {{- if .Values.etcd.secret }}
  - {name: etcd, mountPath: /etc/tokenlake/etcd, readOnly: true}
  {{- end }}
  {{- if .Values.disk.path }}
  - {name: disk, mountPath: /var/lib/tokenlake/disk}
  {{- end }}
{{- end }}

{{/* The volumes of the daemon, without that of its socket. */}}
{{- define "tokenlake.volumes" -}}
# In memory, since only there others cannot remove what lies in /tmp (mode 1777).
- name: temporary
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- if .Values.configSecret }}
- name: config
  secret: {secretName: {{ .Values.configSecret }}, defaultMode: 0440}
{{- end }}
{{- if include "tokenlake.encrypted" . }}
- name: certificates
  projected:
    defaultMode: 0440
    sources:
      {{- range include "tokenlake.nodes" . | fromJsonArray }}
      - secret:
          name: {{ include "tokenlake.name" $ }}-{{ . }}
          optional: true
          items:
            - {key: tls.crt, path: {{ . }}/tls.crt}
            - {key: tls.key, path: {{ . }}/tls.key}
            - {key: ca.crt, path: {{ . }}/ca.crt}
      {{- end }}
{{- end }}
{{- if .Values.etcd.secret }}
- name: etcd
  secret: {secretName: {{ .Values.etcd.secret }}, defaultMode: 0440}
{{- end }}
{{- if .Values.disk.path }}
- name: disk
  hostPath: {path: {{ .Values.disk.path }}, type: Directory}
{{- end }}
{{- end }}

{{/* The directory of the machine in which the daemon's socket lies. */}}
{{- define "tokenlake.socketOfTheMachine" -}}
- name: socket
  {{- if .Values.socket.persistentVolume }}
  persistentVolumeClaim: {claimName: {{ include "tokenlake.name" . }}-socket}
  {{- else }}
  hostPath: {path: {{ .Values.socket.path }}, type: DirectoryOrCreate}
  {{- end }}
{{- end }}
