// Command pause holds a pod's namespaces open: it sleeps until it is told to end. It is a program
// of its own, and not a part of the big binary, because every node imports it inside an image.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
