// A member of a consumer group: `member franz|sarama BOOTSTRAP TOPIC GROUP` prints "PARTITION OFFSET VALUE" for each
// record, and closes at SIGTERM.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kgo"
)

const session = 6 * time.Second

func main() {
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	brokers, topic, group := strings.Split(os.Args[2], ","), os.Args[3], os.Args[4]
	if os.Args[1] == "franz" {
		franz(ctx, brokers, topic, group)
	} else {
		byPartition(ctx, brokers, topic, group)
	}
}

func franz(ctx context.Context, brokers []string, topic, group string) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...),
		kgo.ConsumeTopics(topic),
		kgo.ConsumerGroup(group),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(session),
	)
	if err != nil {
		log.Fatal(err)
	}
	for ctx.Err() == nil {
		client.PollFetches(ctx).EachRecord(func(r *kgo.Record) { fmt.Println(r.Partition, r.Offset, string(r.Value)) })
	}
	if err := client.CommitUncommittedOffsets(context.Background()); err != nil {
		log.Fatal(err)
	}
	client.Close()
}

type printer struct{}

func (printer) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (printer) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (printer) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for record := range claim.Messages() {
		fmt.Println(record.Partition, record.Offset, string(record.Value))
		s.MarkMessage(record, "")
	}
	return nil
}

func byPartition(ctx context.Context, brokers []string, topic, group string) {
	config := sarama.NewConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Group.Session.Timeout = session
	config.Consumer.Group.Heartbeat.Interval = time.Second
	member, err := sarama.NewConsumerGroup(brokers, group, config)
	if err != nil {
		log.Fatal(err)
	}
	for ctx.Err() == nil {
		if err := member.Consume(ctx, []string{topic}, printer{}); err != nil {
			log.Print(err)
			time.Sleep(200 * time.Millisecond)
		}
	}
	if err := member.Close(); err != nil {
		log.Fatal(err)
	}
}
