{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "penstock.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{- /* The Secret with serve.json. */}}
{{- define "penstock.configSecret" -}}
{{- if .Values.existingConfigSecret }}{{ .Values.existingConfigSecret }}{{ else }}{{ .Release.Name }}-config{{ end }}
{{- end }}

{{- /* Labels of the pods that callers reach: the routers' own, or the head's, which holds them. */}}
{{- define "penstock.routerPods" -}}
{{- if .Values.routers.separate }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- else }}
ray.io/cluster: {{ .Release.Name }}
ray.io/node-type: head
{{- end }}
{{- end }}

{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- end }}

{{- /* Places to write: Ray's sessions, and caches of kernels and of the account. */}}
{{- define "penstock.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/penstock
{{- end }}

{{- define "penstock.scratchVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.scratch.tmpSize }}
- name: home
  emptyDir:
    sizeLimit: {{ .Values.scratch.homeSize }}
{{- end }}

{{- define "penstock.modelMounts" -}}
{{- if .Values.model.claim }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- else if .Values.model.download.repo }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "penstock.modelVolumes" -}}
{{- if .Values.model.claim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim }}
    readOnly: true
{{- else if .Values.model.download.repo }}
- name: model
  emptyDir:
    sizeLimit: {{ .Values.model.download.diskSize }}
{{- end }}
{{- end }}

{{- /* What every process of the deployment shows the others: the secret, and the pod's own certificate. */}}
{{- define "penstock.keyMounts" -}}
- name: secret
  mountPath: /etc/penstock/secret
  readOnly: true
{{- if .Values.security.tls.caSecret }}
- name: pod-tls
  mountPath: /etc/penstock/pod-tls
  readOnly: true
{{- end }}
{{- end }}

{{- /* 288 is 0440: Penstock takes no secret that everybody may read. The authority's key is in no running container. */}}
{{- define "penstock.keyVolumes" -}}
- name: secret
  secret:
    secretName: {{ .Values.security.secretName }}
    defaultMode: 288
{{- include "penstock.certificateVolumes" . }}
{{- end }}

{{- define "penstock.certificateVolumes" -}}
{{- if .Values.security.tls.caSecret }}
- name: pod-tls
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: authority
  secret:
    secretName: {{ .Values.security.tls.caSecret }}
    defaultMode: 288
{{- end }}
{{- end }}

{{- /* Ray's own TLS, with the pod's certificate. */}}
{{- define "penstock.rayTls" -}}
- name: RAY_USE_TLS
  value: "1"
- name: RAY_TLS_SERVER_CERT
  value: /etc/penstock/pod-tls/tls.crt
- name: RAY_TLS_SERVER_KEY
  value: /etc/penstock/pod-tls/tls.key
- name: RAY_TLS_CA_CERT
  value: /etc/penstock/pod-tls/ca.crt
{{- end }}

{{- define "penstock.initContainers" -}}
{{- if .Values.security.tls.caSecret }}
initContainers:
  {{- include "penstock.certify" . | nindent 2 }}
  {{- if .Values.model.claim }}
  {{- else if .Values.model.download.repo }}
  {{- include "penstock.download" . | nindent 2 }}
  {{- end }}
{{- else if .Values.model.claim }}
{{- else if .Values.model.download.repo }}
initContainers:
  {{- include "penstock.download" . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Makes the pod's certificate before Ray starts, for its address and for the names of the head's services. */}}
{{- define "penstock.certify" -}}
- name: certify
  image: {{ include "penstock.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["penstock-certify", "/etc/penstock/authority", "/etc/penstock/pod-tls"]
  args: ["{{ .Release.Name }}-admin.{{ .Release.Namespace }}.svc", "{{ .Release.Name }}-head-svc", "{{ .Release.Name }}-head-svc.{{ .Release.Namespace }}.svc", "{{ .Release.Name }}-head-svc.{{ .Release.Namespace }}.svc.cluster.local"]
  env:
    - name: PENSTOCK_POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    - name: PENSTOCK_CERTIFICATE_DAYS
      value: {{ .Values.security.tls.days | quote }}
  resources:
    requests: {cpu: 100m, memory: 64Mi}
    limits: {cpu: "1", memory: 64Mi}
  securityContext:
    {{- include "penstock.containerSecurity" . | nindent 4 }}
    capabilities: {drop: [ALL]}
  volumeMounts:
    - name: authority
      mountPath: /etc/penstock/authority
      readOnly: true
    - name: pod-tls
      mountPath: /etc/penstock/pod-tls
    {{- include "penstock.scratchMounts" . | nindent 4 }}
{{- end }}

{{- /* Fetches the model before Ray starts, where it is not on a volume. */}}
{{- define "penstock.download" -}}
- name: download-model
  image: {{ include "penstock.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["hf", "download", {{ toJson .Values.model.download.repo }}]
  args: ["--revision", {{ toJson .Values.model.download.revision }}, "--local-dir", {{ toJson .Values.model.path }}]
  {{- if .Values.model.download.tokenSecret }}
  env:
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .Values.model.download.tokenSecret }}
          key: HF_TOKEN
  {{- end }}
  resources:
    requests: {cpu: "1", memory: 2Gi}
    limits: {cpu: "2", memory: 4Gi}
  securityContext:
    {{- include "penstock.containerSecurity" . | nindent 4 }}
    capabilities: {drop: [ALL]}
  volumeMounts:
    - name: model
      mountPath: {{ .Values.model.mountPath }}
    {{- include "penstock.scratchMounts" . | nindent 4 }}
{{- end }}

{{- /* Ranks of a worker of one pool; of the pool's own values and `config`. */}}
{{- define "penstock.ranks" -}}
{{ default (default 1 (get .config.engine "tensor_parallel")) (get .pool.engine "tensor_parallel") }}
{{- end }}

{{- /* How much of an amount of one rank the pods of a pool have in all, once there are `maxPods`. */}}
{{- define "penstock.most" -}}
{{ mulf .pool.maxPods (get .pool .amount) (include "penstock.ranks" .) }}
{{- end }}

{{- /* One pool, as `ServeConfig` wants it; of the pool's own values and its name. All amounts are of one rank, and the
pod offers as many times as much as a worker has ranks: it holds all ranks of one worker and of no other. */}}
{{- define "penstock.pool" -}}
{"replicas": {{ .pool.replicas }}, "spares": {{ .pool.spares }}{{ range $key, $value := .pool.bounds }}, "{{ $key }}": {{ $value }}{{ end }}, "num_gpus": {{ .pool.numGpus }}, "num_cpus": {{ .pool.numCpus }}, "resources": {"penstock_{{ .name }}": 1}, "labels": {{ toJson .pool.labels }}, "engine": {{ toJson .pool.engine }}}
{{- end }}

{{- /* Refuses a pool whose workers would never find a place; of its values, its name and `config`. */}}
{{- define "penstock.check" -}}
{{- if gt (add .pool.replicas .pool.spares) (int64 .pool.maxPods) }}
{{- fail (printf "pools.%v.maxPods is %v, and replicas and spares are %v together: each wants a pod; raise maxPods" .name .pool.maxPods (add .pool.replicas .pool.spares)) }}
{{- end }}
{{- if gt (int64 (get .pool.bounds "min_replicas")) (int64 .pool.replicas) }}
{{- fail (printf "pools.%v.bounds.min_replicas is %v, above its replicas, %v; change one of them" .name .pool.bounds.min_replicas .pool.replicas) }}
{{- end }}
{{- if gt (int64 .pool.replicas) (int64 (default .pool.replicas (get .pool.bounds "max_replicas"))) }}
{{- fail (printf "pools.%v.bounds.max_replicas is %v, below its replicas, %v; change one of them" .name .pool.bounds.max_replicas .pool.replicas) }}
{{- end }}
{{- range $key, $value := .pool.resources.limits }}
{{- if hasSuffix "/gpu" $key }}
{{- if ne (float64 $value) (mulf $.pool.numGpus (include "penstock.ranks" $)) }}
{{- fail (printf "pools.%v.resources.limits has %v of %v; numGpus is %v and a worker has %v ranks in one pod: give their product" $.name $value $key $.pool.numGpus (include "penstock.ranks" $)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Asks every router at its metrics port, where no client certificate is demanded; one that is ready is enough. */}}
{{- define "penstock.readyCommand" -}}
{{- if .Values.routers.separate -}}
["penstock-health", "live", "127.0.0.1:{{ .Values.ports.admin }}"]
{{- else -}}
["penstock-health", "ready"{{ range $index, $port := .Values.ports.metrics }}, "http{{ if $.Values.tls.secretName }}s{{ end }}://127.0.0.1:{{ $port }}/health"{{ end }}]
{{- end }}
{{- end }}

{{- /* One router's metrics; of its port and the root. */}}
{{- define "penstock.endpoint" -}}
- targetPort: {{ .port }}
  path: /metrics
  interval: {{ .root.Values.metrics.serviceMonitor.interval }}
  {{- if .root.Values.tls.secretName }}
  scheme: https
  tlsConfig:
    ca:
      secret:
        name: {{ .root.Values.tls.secretName }}
        key: ca.crt
    serverName: {{ .root.Release.Name }}-router.{{ .root.Release.Namespace }}.svc
  {{- end }}
  {{- if .root.Values.metrics.tokenSecret }}
  authorization:
    type: Bearer
    credentials:
      name: {{ .root.Values.metrics.tokenSecret }}
      key: token
  {{- end }}
{{- end }}

{{- /* The router's own settings, and where its metrics token lies. */}}
{{- define "penstock.router" -}}
{{- if .Values.metrics.tokenSecret -}}
{{ toJson (merge (dict "metrics_token_file" "/etc/penstock/metrics/token") .Values.config.router) }}
{{- else -}}
{{ toJson .Values.config.router }}
{{- end }}
{{- end }}

{{- /* What a router of its own reads, as one line of JSON. */}}
{{- define "penstock.routerConfig" -}}
{"model": {{ toJson .Values.model.path }}, "served_model": {{ toJson .Values.model.servedName }}, "host": "0.0.0.0", "http_port": {{ .Values.ports.http }}, "grpc_port": {{ .Values.ports.grpc }}, "metrics_port": {{ .Values.routers.metricsPort }}, "peer_port": {{ .Values.routers.peerPort }}, "admin": "{{ .Release.Name }}-admin.{{ .Release.Namespace }}.svc:{{ .Values.ports.admin }}",
{{- if .Values.tls.secretName }} "tls": { {{- if .Values.tls.clientCa }}"ca_file": "/etc/penstock/tls/ca.crt", {{ end }}"cert_file": "/etc/penstock/tls/tls.crt", "key_file": "/etc/penstock/tls/tls.key"},{{ end }}
{{- if .Values.tenants }} "tenants_file": "/etc/penstock/config/tenants.json",{{ end }}
{{- range $key, $value := .Values.config.deployment }}{{ if eq $key "drain_s" }} "drain_s": {{ toJson $value }},{{ end }}{{ end }}
{{- range $key, $value := .Values.config.autoscaler }}{{ if eq $key "slo" }} "slo": {{ toJson $value }},{{ end }}{{ end }}
{{- range $key, $value := .Values.config.router }} "{{ $key }}": {{ toJson $value }},{{ end }}
{{- if .Values.metrics.tokenSecret }} "metrics_token_file": "/etc/penstock/metrics/token",{{ end }} "security": {
{{- if .Values.security.tls.caSecret }}"tls": {"ca_file": "/etc/penstock/pod-tls/ca.crt", "cert_file": "/etc/penstock/pod-tls/tls.crt", "key_file": "/etc/penstock/pod-tls/tls.key"}, {{ end }}"secret_file": "/etc/penstock/secret/secret"}}
{{- end }}
