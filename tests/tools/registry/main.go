// Images for containerd's client tests, and a registry that serves them under their public names.
//
//	registry add LAYOUT REPOSITORY:TAG CONFIG LAYER...
//	registry serve LAYOUT ADDRESS CERTIFICATE HOST...
//
// add puts an image into an OCI image layout (a directory) and prints its digest. It is an index of several platforms:
// linux/amd64 has the LAYERs (tars) and the configuration in the file CONFIG; the others, and an image without LAYERs,
// hold one file that says what they are. No two images or platforms have a blob in common, as it is in public
// registries mostly: tests look at what was collected, or not fetched.
//
// serve answers under the names HOST, with a certificate of its own, which it writes to the file CERTIFICATE. It
// prints a line when it listens, and serves until it is killed.
package main

import (
	"archive/tar"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// The annotation of an image layout's index that names an image (image-spec 1.0, annotations.md).
const refName = "org.opencontainers.image.ref.name"

// What an image is offered for besides linux/amd64. A test wants the first two and is not to get the third.
var others = []v1.Platform{
	{OS: "linux", Architecture: "arm64", Variant: "v8"},
	{OS: "linux", Architecture: "s390x"},
	{OS: "linux", Architecture: "ppc64le"},
}

func main() {
	args := os.Args[1:]
	var err error
	switch {
	case len(args) >= 4 && args[0] == "add":
		err = add(args[1], args[2], args[3], args[4:])
	case len(args) >= 5 && args[0] == "serve":
		err = serve(args[1], args[2], args[3], args[4:])
	default:
		err = errors.New("usage: registry add LAYOUT REPOSITORY:TAG CONFIG LAYER... | serve LAYOUT ADDRESS CERTIFICATE HOST...")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "registry:", err)
		os.Exit(1)
	}
}

func add(dir, reference, configFile string, layers []string) error {
	var config v1.Config
	text, err := os.ReadFile(configFile)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return fmt.Errorf("%s: %w", configFile, err)
	}

	// An image of Windows is one that has nothing for this machine.
	platforms := append([]v1.Platform{{OS: "linux", Architecture: "amd64"}}, others...)
	if strings.Contains(reference, "windows") {
		platforms = []v1.Platform{{OS: "windows", Architecture: "amd64", OSVersion: "10.0.17763.1"}}
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for i, platform := range platforms {
		files := layers
		if i > 0 {
			files = nil
		}
		image, err := newImage(reference, platform, config, files)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        image,
			Descriptor: v1.Descriptor{Platform: &platform},
		})
	}

	path, err := layout.FromPath(dir)
	if err != nil {
		if path, err = layout.Write(dir, empty.Index); err != nil {
			return err
		}
	}
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{refName: reference})); err != nil {
		return err
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	fmt.Println(digest)
	return nil
}

func newImage(reference string, platform v1.Platform, config v1.Config, files []string) (v1.Image, error) {
	var layers []mutate.Addendum
	if len(files) == 0 {
		files = []string{os.DevNull}
	}
	for i, file := range files {
		layer, err := newLayer(fmt.Sprintf("%s %s layer %d\n", reference, platform, i), file)
		if err != nil {
			return nil, err
		}
		layers = append(layers, mutate.Addendum{Layer: layer, MediaType: types.OCILayer})
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.ConfigFile(base, &v1.ConfigFile{
		Created:      v1.Time{Time: time.Unix(0, 0).UTC()},
		OS:           platform.OS,
		OSVersion:    platform.OSVersion,
		Architecture: platform.Architecture,
		Variant:      platform.Variant,
		Config:       config,
		RootFS:       v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(image, layers...)
}

// newLayer is the tar in a file with one more file in front, which makes its digest its own.
func newLayer(marker, file string) (v1.Layer, error) {
	var front bytes.Buffer
	writer := tar.NewWriter(&front)
	header := tar.Header{Name: "etc/image", Mode: 0o644, Size: int64(len(marker)), Format: tar.FormatGNU}
	if err := writer.WriteHeader(&header); err != nil {
		return nil, err
	}
	if _, err := writer.Write([]byte(marker)); err != nil {
		return nil, err
	}
	// Not Close: that would end the tar here.
	if err := writer.Flush(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) {
		rest, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		content := io.Reader(rest)
		if file == os.DevNull {
			// Two empty blocks are the end of a tar.
			content = bytes.NewReader(make([]byte, 1024))
		}
		return struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(front.Bytes()), content), rest}, nil
	}
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}

func serve(dir, address, certificateFile string, hosts []string) error {
	handler := registry.New(
		registry.WithBlobHandler(registry.NewDiskBlobHandler(filepath.Join(dir, "blobs"))),
		registry.Logger(log.New(io.Discard, "", 0)),
	)
	if err := publish(handler, dir); err != nil {
		return err
	}
	certificate, err := newCertificate(certificateFile, hosts)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	fmt.Println("serving on", listener.Addr())
	server := http.Server{
		Handler:   handler,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}},
	}
	return server.ServeTLS(listener, "", "")
}

// publish tells the registry of the manifests: those of the platforms first, since an index is taken only after them.
func publish(handler http.Handler, dir string) error {
	path, err := layout.FromPath(dir)
	if err != nil {
		return err
	}
	all, err := path.ImageIndex()
	if err != nil {
		return err
	}
	named, err := all.IndexManifest()
	if err != nil {
		return err
	}
	for _, image := range named.Manifests {
		repository, tag, found := strings.Cut(image.Annotations[refName], ":")
		if !found {
			return fmt.Errorf("%s: %s has no name", dir, image.Digest)
		}
		index, err := all.ImageIndex(image.Digest)
		if err != nil {
			return err
		}
		manifests, err := index.IndexManifest()
		if err != nil {
			return err
		}
		for _, manifest := range manifests.Manifests {
			if err := put(handler, path, repository, manifest.Digest.String(), manifest); err != nil {
				return err
			}
		}
		if err := put(handler, path, repository, tag, image); err != nil {
			return err
		}
	}
	return nil
}

func put(handler http.Handler, path layout.Path, repository, reference string, manifest v1.Descriptor) error {
	content, err := path.Bytes(manifest.Digest)
	if err != nil {
		return err
	}
	url := fmt.Sprintf("/v2/%s/manifests/%s", repository, reference)
	request := httptest.NewRequest(http.MethodPut, url, bytes.NewReader(content))
	request.Header.Set("Content-Type", string(manifest.MediaType))
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, request)
	if answer.Code != http.StatusCreated {
		return fmt.Errorf("the registry does not take %s: %s", url, answer.Body)
	}
	return nil
}

// newCertificate is a certificate that stands for itself, for clients who are told to trust the file.
func newCertificate(file string, hosts []string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "registry of the conformance tests"},
		NotBefore:             time.Now().Add(-24 * time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		DNSNames:              hosts,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
