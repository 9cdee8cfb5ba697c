// Command devcluster is a whole Kubernetes in one binary: etcd, the control plane, the node
// components, kubectl and helm. The first argument (or the name it is called by, so that links
// named kubectl and helm work) says which one to be. The Python package beside this file starts
// the components and joins them into a cluster on one machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlerrors "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// components run with os.Args already set to their own name and arguments; each returns its exit code.
var components = map[string]func() int{
	"etcd":                    func() int { etcdmain.Main(os.Args); return 0 },
	"helm":                    runHelm,
	"kube-apiserver":          cobraCommand(apiserver.NewAPIServerCommand),
	"kube-controller-manager": cobraCommand(controllers.NewControllerManagerCommand),
	"kube-scheduler":          cobraCommand(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 cobraCommand(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kube-proxy":              cobraCommand(proxy.NewProxyCommand),
	"kubectl":                 runKubectl,
}

// cobraCommand builds the command late: some constructors read os.Args.
func cobraCommand(build func() *cobra.Command) func() int {
	return func() int { return cli.Run(build()) }
}

func runKubectl() int {
	kubectlerrors.CheckErr(cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()))
	return 0
}

func runHelm() int {
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := command.Execute(); err != nil {
		var failed helm.CommandError
		if errors.As(err, &failed) {
			return failed.ExitCode
		}
		return 1
	}
	return 0
}

func main() {
	run, called := components[filepath.Base(os.Args[0])]
	if !called {
		if len(os.Args) < 2 || components[os.Args[1]] == nil {
			fmt.Fprintln(os.Stderr, "usage: devcluster COMPONENT [ARGUMENT]...; components:")
			for name := range components {
				fmt.Fprintln(os.Stderr, "  "+name)
			}
			os.Exit(2)
		}
		os.Args = os.Args[1:]
		run = components[os.Args[0]]
	}
	os.Exit(run())
}
