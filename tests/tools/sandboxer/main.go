// A sandbox controller for the tests' containerd (its `proxy_plugins` of type `sandbox`).
//
//	sandboxer SOCKET CONTAINERD STATE IMAGE
//
// containerd's CRI plugin carries standard streams over its own connections (`io_type = "streaming"`) only in sandboxes
// whose controller names the address of their shim. Its built-in one, `podsandbox`, never does, and the other, `shim`,
// wants a shim that serves the sandbox API. This one does what `podsandbox` does and names the address: a sandbox is an
// ordinary task of IMAGE, made by the containerd that listens on CONTAINERD, whose runtimes' state is below STATE. It
// serves on the socket SOCKET, prints a line when it listens, and ends when it is killed. It knows no network and makes
// none of the files (hosts, resolv.conf) that `podsandbox` makes for its containers.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	api "github.com/containerd/containerd/api/services/sandbox/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// The namespace of containerd's CRI plugin.
const namespace = "k8s.io"

// What every shim of containerd 2.x serves.
const taskAPI = 3

func main() {
	if len(os.Args) != 5 {
		log.Fatalf("usage: %s SOCKET CONTAINERD STATE IMAGE", os.Args[0])
	}
	containerd, err := client.New(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	// The client of containerd's gets its namespace from the context.
	server := grpc.NewServer(grpc.UnaryInterceptor(
		func(ctx context.Context, r any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			return handle(namespaces.WithNamespace(ctx, namespace), r)
		}))
	api.RegisterControllerServer(server, &controller{
		containerd: containerd,
		state:      os.Args[3],
		image:      os.Args[4],
		sandboxes:  map[string]*sandbox{},
	})
	fmt.Println("listening")
	log.Fatal(server.Serve(listener))
}

type controller struct {
	api.UnimplementedControllerServer
	containerd   *client.Client
	state, image string

	mutex     sync.Mutex
	sandboxes map[string]*sandbox
}

// A sandbox. It is in the table from its creation to its shutdown; all but the first two fields are set by Start.
type sandbox struct {
	runtime *types.Sandbox_Runtime
	created *timestamppb.Timestamp
	address string
	pid     uint32
	// Closed when its task has ended, after the next two are set.
	ended    chan struct{}
	status   uint32
	exitedAt *timestamppb.Timestamp
}

func (c *controller) find(id string) (*sandbox, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if s, ok := c.sandboxes[id]; ok {
		return s, nil
	}
	return nil, errgrpc.ToGRPC(fmt.Errorf("sandbox %s: %w", id, errdefs.ErrNotFound))
}

func (c *controller) Create(_ context.Context, r *api.ControllerCreateRequest) (*api.ControllerCreateResponse, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.sandboxes[r.SandboxID] = &sandbox{
		runtime: r.Sandbox.Runtime,
		created: timestamppb.Now(),
		ended:   make(chan struct{}),
	}
	return &api.ControllerCreateResponse{SandboxID: r.SandboxID}, nil
}

func (c *controller) Start(ctx context.Context, r *api.ControllerStartRequest) (*api.ControllerStartResponse, error) {
	s, err := c.find(r.SandboxID)
	if err != nil {
		return nil, err
	}
	if err := c.start(ctx, r.SandboxID, s); err != nil {
		if left := c.delete(ctx, r.SandboxID); left != nil {
			log.Printf("sandbox %s: %v", r.SandboxID, left)
		}
		return nil, errgrpc.ToGRPC(err)
	}
	return &api.ControllerStartResponse{
		SandboxID: r.SandboxID,
		Pid:       s.pid,
		CreatedAt: s.created,
		Address:   s.address,
		Version:   taskAPI,
	}, nil
}

func (c *controller) start(ctx context.Context, id string, s *sandbox) error {
	image, err := c.containerd.GetImage(ctx, c.image)
	if err != nil {
		return err
	}
	container, err := c.containerd.NewContainer(ctx, id,
		client.WithNewSnapshot(id, image),
		client.WithNewSpec(
			oci.WithImageConfig(image),
			oci.WithHostNamespace(specs.NetworkNamespace),
			oci.WithAnnotations(map[string]string{
				"io.kubernetes.cri.container-type": "sandbox",
				"io.kubernetes.cri.sandbox-id":     id,
			})),
		client.WithRuntime(s.runtime.Name, s.runtime.Options))
	if err != nil {
		return err
	}
	pause, err := container.NewTask(ctx, cio.NullIO)
	if err != nil {
		return err
	}
	s.pid = pause.Pid()
	address, err := os.ReadFile(filepath.Join(c.state, namespace, id, "address"))
	if err != nil {
		return err
	}
	s.address = "ttrpc+" + string(address)
	// The shim outlives containerd, so the wait is for its own answer.
	connection, err := net.Dial("unix", strings.TrimPrefix(string(address), "unix://"))
	if err != nil {
		return err
	}
	go s.wait(ttrpc.NewClient(connection), id)
	return pause.Start(ctx)
}

func (s *sandbox) wait(shim *ttrpc.Client, id string) {
	defer close(s.ended)
	defer shim.Close()
	ended, err := task.NewTTRPCTaskClient(shim).Wait(context.Background(), &task.WaitRequest{ID: id})
	if err != nil {
		log.Printf("sandbox %s: %v", id, err)
		s.status, s.exitedAt = client.UnknownExitStatus, timestamppb.Now()
		return
	}
	s.status, s.exitedAt = ended.ExitStatus, ended.ExitedAt
}

func (c *controller) Platform(context.Context, *api.ControllerPlatformRequest) (*api.ControllerPlatformResponse, error) {
	platform := &types.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH}
	return &api.ControllerPlatformResponse{Platform: platform}, nil
}

func (c *controller) Stop(ctx context.Context, r *api.ControllerStopRequest) (*api.ControllerStopResponse, error) {
	if err := c.stop(ctx, r.SandboxID); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &api.ControllerStopResponse{}, nil
}

// stop deletes the sandbox's task, if it still has one.
func (c *controller) stop(ctx context.Context, id string) error {
	container, err := c.containerd.LoadContainer(ctx, id)
	if err != nil {
		return ignoreMissing(err)
	}
	pause, err := container.Task(ctx, nil)
	if err != nil {
		return ignoreMissing(err)
	}
	_, err = pause.Delete(ctx, client.WithProcessKill)
	return ignoreMissing(err)
}

func (c *controller) Shutdown(ctx context.Context, r *api.ControllerShutdownRequest) (*api.ControllerShutdownResponse, error) {
	if err := c.delete(ctx, r.SandboxID); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &api.ControllerShutdownResponse{}, nil
}

// delete takes all of the sandbox away.
func (c *controller) delete(ctx context.Context, id string) error {
	if err := c.stop(ctx, id); err != nil {
		return err
	}
	container, err := c.containerd.LoadContainer(ctx, id)
	if err == nil {
		err = container.Delete(ctx, client.WithSnapshotCleanup)
	}
	if err := ignoreMissing(err); err != nil {
		return err
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	delete(c.sandboxes, id)
	return nil
}

func ignoreMissing(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

func (c *controller) Wait(ctx context.Context, r *api.ControllerWaitRequest) (*api.ControllerWaitResponse, error) {
	s, err := c.find(r.SandboxID)
	if err != nil {
		return nil, err
	}
	select {
	case <-s.ended:
		return &api.ControllerWaitResponse{ExitStatus: s.status, ExitedAt: s.exitedAt}, nil
	case <-ctx.Done():
		return nil, errgrpc.ToGRPC(ctx.Err())
	}
}

func (c *controller) Status(_ context.Context, r *api.ControllerStatusRequest) (*api.ControllerStatusResponse, error) {
	s, err := c.find(r.SandboxID)
	if err != nil {
		return nil, err
	}
	status := &api.ControllerStatusResponse{
		SandboxID: r.SandboxID,
		Pid:       s.pid,
		State:     "SANDBOX_READY",
		CreatedAt: s.created,
		Address:   s.address,
		Version:   taskAPI,
	}
	select {
	case <-s.ended:
		status.State, status.ExitedAt = "SANDBOX_NOTREADY", s.exitedAt
	default:
	}
	return status, nil
}

func (c *controller) Metrics(ctx context.Context, r *api.ControllerMetricsRequest) (*api.ControllerMetricsResponse, error) {
	container, err := c.containerd.LoadContainer(ctx, r.SandboxID)
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	pause, err := container.Task(ctx, nil)
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	metrics, err := pause.Metrics(ctx)
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &api.ControllerMetricsResponse{Metrics: metrics}, nil
}
