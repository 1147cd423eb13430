{{- define "holder" -}}{{ .Release.Name }}-holder{{- end }}
{{- define "etcd" -}}{{ .Release.Name }}-etcd{{- end }}
{{- define "members" -}}
{{- if .Values.etcd.members -}}
{{ join "," .Values.etcd.members }}
{{- else -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{ if $i }},{{ end }}{{ include "etcd" $ }}-{{ $i }}.{{ include "etcd" $ }}:2379
{{- end -}}
{{- end -}}
{{- end }}
