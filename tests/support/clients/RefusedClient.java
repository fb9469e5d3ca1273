import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.time.Duration;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;

import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.admin.ScramCredentialInfo;
import org.apache.kafka.clients.admin.ScramMechanism;
import org.apache.kafka.clients.admin.UserScramCredentialUpsertion;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.acl.AccessControlEntry;
import org.apache.kafka.common.acl.AclBinding;
import org.apache.kafka.common.acl.AclBindingFilter;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;

/**
 * Attempts that an ACL refuses, by a producer, a consumer and an admin client; needs kafka-clients 4.
 *
 * Arguments: the addresses to make all attempts at, the attempts, both with commas between, the JAAS configuration of the
 * other user, for attempts that begin with "another's:", and the settings of all clients as name=value. A setting
 * "name.NAME" is what NAME means in attempts. For each address, all at once, and each attempt it prints "NUMBER TAB
 * ATTEMPT TAB OUTCOME", where the outcome is "ok" or the exception. Written for Janino, as JavaClient is.
 */
public final class RefusedClient implements Runnable {
    private static final String BYTES = "org.apache.kafka.common.serialization.ByteArray";
    private static final Duration PATIENCE = Duration.ofSeconds(20L);

    private final String[] arguments;
    private final int number;
    private final PrintStream out;
    private Properties settings;
    private Map names;

    private RefusedClient(String[] arguments, int number, PrintStream out) {
        this.arguments = arguments;
        this.number = number;
        this.out = out;
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, "UTF-8");
        Thread[] threads = new Thread[arguments[0].split(",").length];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(new RefusedClient(arguments, i, out));
            threads[i].start();
        }
        for (int i = 0; i < threads.length; i++) {
            threads[i].join();
        }
    }

    public void run() {
        String[] attempts = arguments[1].split(",");
        for (int i = 0; i < attempts.length; i++) {
            settings = new Properties();
            names = new HashMap();
            for (int j = 3; j < arguments.length; j++) {
                int equals = arguments[j].indexOf('=');
                String name = arguments[j].substring(0, equals), value = arguments[j].substring(equals + 1);
                if (name.startsWith("name.")) {
                    names.put(name.substring(5), value);
                } else {
                    settings.put(name, value);
                }
            }
            settings.put("bootstrap.servers", arguments[0].split(",")[number]);
            if (attempts[i].startsWith("another's:")) {
                settings.put("sasl.jaas.config", arguments[2]);
            }
            out.println(number + "\t" + attempts[i] + "\t" + outcome(attempts[i]).replace('\n', ' '));
        }
    }

    private String outcome(String attempt) {
        try {
            attempt(attempt);
            return "ok";
        } catch (Exception error) {
            return reason(error).toString();
        }
    }

    /** What a wrapper is for: a producer whose thread was refused before the call is only "in an error state". */
    private static Throwable reason(Throwable error) {
        boolean wraps = error instanceof ExecutionException || error.getClass().equals(KafkaException.class);
        return wraps && error.getCause() != null ? reason(error.getCause()) : error;
    }

    private String named(String name) {
        return names.containsKey(name) ? (String) names.get(name) : name;
    }

    private void attempt(String what) throws Exception {
        String[] words = what.substring(what.indexOf(':') + 1).split(" ");
        if (words[0].equals("write")) {
            write(named(words[1]), false);
        } else if (words[0].equals("write-idempotently")) {
            write(named(words[1]), true);
        } else if (words[0].equals("transact")) {
            transact(words[1], words[2], words.length > 3 ? words[3] : null);
        } else if (words[0].equals("read")) {
            read(named(words[1]));
        } else if (words[0].equals("join")) {
            join(words[1], named(words[2]));
        } else if (words[0].equals("commit")) {
            commit(words[1], named(words[2]));
        } else {
            administer(words[0], words.length > 1 ? named(words[1]) : null);
        }
    }

    private KafkaProducer producer() {
        settings.put("key.serializer", BYTES + "Serializer");
        settings.put("value.serializer", BYTES + "Serializer");
        settings.put("max.block.ms", "20000");
        settings.put("delivery.timeout.ms", "20000");
        settings.put("request.timeout.ms", "10000");
        settings.put("linger.ms", "0");
        return new KafkaProducer(settings);
    }

    private void write(String topic, boolean idempotent) throws Exception {
        settings.put("enable.idempotence", String.valueOf(idempotent));
        KafkaProducer producer = producer();
        try {
            producer.send(new ProducerRecord(topic, new byte[1])).get();
        } finally {
            producer.close(Duration.ZERO);
        }
    }

    private void transact(String id, String topic, String group) throws Exception {
        settings.put("transactional.id", id);
        KafkaProducer producer = producer();
        try {
            producer.initTransactions();
            producer.beginTransaction();
            if (group == null) {
                producer.send(new ProducerRecord(named(topic), new byte[1])).get();
            } else {
                TopicPartition place = new TopicPartition(named(topic), 0);
                Map offsets = Collections.singletonMap(place, new OffsetAndMetadata(0L));
                producer.sendOffsetsToTransaction(offsets, new ConsumerGroupMetadata(group));
            }
            producer.commitTransaction();
        } finally {
            producer.close(Duration.ZERO);
        }
    }

    private KafkaConsumer consumer() {
        settings.put("key.deserializer", BYTES + "Deserializer");
        settings.put("value.deserializer", BYTES + "Deserializer");
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("default.api.timeout.ms", "20000");
        return new KafkaConsumer(settings);
    }

    private void poll(KafkaConsumer consumer) {
        try {
            consumer.poll(PATIENCE);
        } finally {
            consumer.close(Duration.ZERO);
        }
    }

    private void read(String topic) {
        KafkaConsumer consumer = consumer();
        consumer.assign(Collections.singletonList(new TopicPartition(topic, 0)));
        poll(consumer);
    }

    private void join(String group, String topic) {
        settings.put("group.id", group);
        KafkaConsumer consumer = consumer();
        consumer.subscribe(Collections.singletonList(topic));
        poll(consumer);
    }

    private void commit(String group, String topic) {
        settings.put("group.id", group);
        KafkaConsumer consumer = consumer();
        try {
            TopicPartition place = new TopicPartition(topic, 0);
            consumer.commitSync(Collections.singletonMap(place, new OffsetAndMetadata(0L)));
        } finally {
            consumer.close(Duration.ZERO);
        }
    }

    private void administer(String what, String name) throws Exception {
        settings.put("default.api.timeout.ms", "20000");
        settings.put("request.timeout.ms", "10000");
        Admin admin = AdminClient.create(settings);
        try {
            asked(admin, what, name).get();
        } finally {
            admin.close(Duration.ZERO);
        }
    }

    private static Future asked(Admin admin, String what, String name) throws Exception {
        if (what.equals("create-topic")) {
            return admin.createTopics(Collections.singletonList(new NewTopic(name, 1, (short) 1))).all();
        } else if (what.equals("delete-topic")) {
            return admin.deleteTopics(Collections.singletonList(name)).all();
        } else if (what.equals("add-partitions")) {
            return admin.createPartitions(Collections.singletonMap(name, NewPartitions.increaseTo(9))).all();
        } else if (what.equals("describe-topic")) {
            return admin.describeTopics(Collections.singletonList(name)).allTopicNames();
        } else if (what.equals("describe-settings")) {
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, name);
            return admin.describeConfigs(Collections.singletonList(resource)).all();
        } else if (what.equals("describe-broker-settings")) {
            Collection nodes = (Collection) admin.describeCluster().nodes().get();
            Node node = (Node) nodes.iterator().next();
            ConfigResource resource = new ConfigResource(ConfigResource.Type.BROKER, node.idString());
            return admin.describeConfigs(Collections.singletonList(resource)).all();
        } else if (what.equals("ends-of")) {
            TopicPartition place = new TopicPartition(name, 0);
            return admin.listOffsets(Collections.singletonMap(place, OffsetSpec.latest())).all();
        } else if (what.equals("offsets-of-group")) {
            return admin.listConsumerGroupOffsets(name).partitionsToOffsetAndMetadata();
        } else if (what.equals("create-token")) {
            return admin.createDelegationToken().delegationToken();
        } else if (what.equals("describe-tokens")) {
            return admin.describeDelegationToken().delegationTokens();
        } else if (what.equals("delete-records")) {
            TopicPartition place = new TopicPartition(name, 0);
            return admin.deleteRecords(Collections.singletonMap(place, RecordsToDelete.beforeOffset(0L))).all();
        } else if (what.equals("alter-settings")) {
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, name);
            AlterConfigOp change =
                new AlterConfigOp(new ConfigEntry("retention.ms", "1000000"), AlterConfigOp.OpType.SET);
            return admin.incrementalAlterConfigs(
                Collections.singletonMap(resource, Collections.singletonList(change))).all();
        } else if (what.equals("describe-group")) {
            return admin.describeConsumerGroups(Collections.singletonList(name)).all();
        } else if (what.equals("delete-group")) {
            return admin.deleteConsumerGroups(Collections.singletonList(name)).all();
        } else if (what.equals("elect-leaders")) {
            return admin.electLeaders(ElectionType.PREFERRED,
                Collections.singleton(new TopicPartition(name, 0))).all();
        } else if (what.equals("describe-acls")) {
            return admin.describeAcls(AclBindingFilter.ANY).values();
        } else if (what.equals("create-acl")) {
            return admin.createAcls(Collections.singletonList(acl(name))).all();
        } else if (what.equals("delete-acl")) {
            return admin.deleteAcls(Collections.singletonList(acl(name).toFilter())).all();
        } else if (what.equals("describe-users")) {
            return admin.describeUserScramCredentials().all();
        } else if (what.equals("alter-user")) {
            ScramCredentialInfo kind = new ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096);
            UserScramCredentialUpsertion change = new UserScramCredentialUpsertion(name, kind, new byte[] {1, 2, 3});
            return admin.alterUserScramCredentials(Collections.singletonList(change)).all();
        }
        throw new IllegalArgumentException(what);
    }

    private static AclBinding acl(String topic) {
        return new AclBinding(new ResourcePattern(ResourceType.TOPIC, topic, PatternType.LITERAL),
            new AccessControlEntry("User:mallory", "*", AclOperation.READ, AclPermissionType.ALLOW));
    }
}
