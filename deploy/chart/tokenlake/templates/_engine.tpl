{{- define "tokenlake.engineContainer" -}}
name: vllm
image: {{ .Values.engine.image }}
command: [vllm, serve, {{ .Values.engine.model | quote }}]
args:
  - --port={{ .Values.engine.port }}
  - --kv-transfer-config={"kv_connector":"TokenLakeConnector","kv_connector_module_path":"tokenlake_client.engines.vllm","kv_role":"kv_both","kv_connector_extra_config":{"socket":"/run/tokenlake/tokenlake-local.sock"}}
  {{- range .Values.engine.args }}
  - {{ . | quote }}
  {{- end }}
env:
  # The user is in no /etc/passwd.
  - {name: HOME, value: /cache}
  - {name: USER, value: vllm}
  {{- with .Values.engine.env }}{{ toYaml . | nindent 2 }}{{ end }}
ports:
  - {name: http, containerPort: {{ .Values.engine.port }}}
{{- with .Values.engine.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
# An hour for weights that are downloaded.
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  failureThreshold: 720
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
# No new requests come when the engine ends: routers have seen by then that the pod leaves.
lifecycle:
  preStop:
    sleep: {seconds: 10}
securityContext:
  {{- include "tokenlake.restricted" . | nindent 2 }}
volumeMounts:
  - {name: socket, mountPath: /run/tokenlake}
  - {name: shared-memory, mountPath: /dev/shm}
  - {name: cache, mountPath: /cache}
{{- end }}

{{- define "tokenlake.engineVolumes" -}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.sharedMemory }}}
- name: cache
  {{- if .Values.engine.cacheClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.engine.cacheClaim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{- define "tokenlake.enginePlace" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.engine.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.engine.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
