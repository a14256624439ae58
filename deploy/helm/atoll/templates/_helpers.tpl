{{- define "atoll.labels" -}}
app.kubernetes.io/name: atoll
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "atoll.gateways" -}}
{{- range $index := until (int .Values.gateway.replicas) -}}
{{- if $index }},{{ end }}http://atoll-gateway-{{ $index }}.atoll-gateways:8080
{{- end }}
{{- end }}
{{- define "atoll.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "atoll.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
