// Renders the templates of a chart with Go's own text/template and the few functions that the chart uses:
//
//	go run render_chart.go CHART VALUES.json > manifests
//
// For tests where Helm is not installed.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// The outermost layer in lines, so that others may stand beside it; what is inside as JSON, which is YAML too.
func toYaml(v any) string {
	var lines []string
	write := func(head string, v any) {
		text, err := json.Marshal(v)
		check(err)
		lines = append(lines, head+string(text))
	}
	switch found := v.(type) {
	case map[string]any:
		for key, each := range found {
			write(fmt.Sprintf("%q: ", key), each)
		}
		sort.Strings(lines)
	case []any:
		for _, each := range found {
			write("- ", each)
		}
	}
	if len(lines) == 0 {
		write("", v)
	}
	return strings.Join(lines, "\n")
}

func main() {
	var data map[string]any
	text, err := os.ReadFile(os.Args[2])
	check(err)
	check(json.Unmarshal(text, &data))
	root := template.New("chart").Option("missingkey=error")
	root.Funcs(template.FuncMap{
		"quote":  func(v any) string { return fmt.Sprintf("%q", fmt.Sprint(v)) },
		"toYaml": toYaml,
		"hasKey": func(m map[string]any, key string) bool { _, ok := m[key]; return ok },
		"hasPrefix": func(prefix, text string) bool { return strings.HasPrefix(text, prefix) },
		"int":       func(v any) int { n, ok := v.(float64); _ = ok; return int(n) },
		"until": func(n int) []int {
			found := make([]int, n)
			for i := range found {
				found[i] = i
			}
			return found
		},
		"fail": func(text string) (string, error) { return "", fmt.Errorf("%s", text) },
		"nindent": func(n int, s string) string {
			pad := strings.Repeat(" ", n)
			return "\n" + pad + strings.ReplaceAll(s, "\n", "\n"+pad)
		},
		"include": func(name string, v any) string {
			var b bytes.Buffer
			check(root.ExecuteTemplate(&b, name, v))
			return b.String()
		},
	})
	files, err := filepath.Glob(filepath.Join(os.Args[1], "templates", "*"))
	check(err)
	sort.Strings(files)
	for _, file := range files {
		source, err := os.ReadFile(file)
		check(err)
		_, err = root.New(filepath.Base(file)).Parse(string(source))
		check(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, ".yaml") {
			fmt.Println("---")
			check(root.ExecuteTemplate(os.Stdout, filepath.Base(file), data))
		}
	}
}
