import dev.langchain4j.agent.tool.P;
import dev.langchain4j.agent.tool.Tool;
import dev.langchain4j.model.anthropic.AnthropicChatModel;
import dev.langchain4j.model.anthropic.AnthropicStreamingChatModel;
import dev.langchain4j.model.chat.ChatModel;
import dev.langchain4j.model.chat.StreamingChatModel;
import dev.langchain4j.model.openai.OpenAiChatModel;
import dev.langchain4j.model.openai.OpenAiStreamingChatModel;
import dev.langchain4j.service.AiServices;
import dev.langchain4j.service.TokenStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.CompletableFuture;

/** AI services with one tool, over chat completions and Messages, streaming and not. */
class LangChain4j {
    static class Notes {
        @Tool("Reads a note.")
        String read_note(@P("the name of the file") String name) throws IOException {
            return Files.readString(Path.of(name));
        }
    }

    interface Assistant {
        String ask(String question);
    }

    interface StreamingAssistant {
        TokenStream ask(String question);
    }

    record Sum(int total) {}

    interface Adder {
        Sum add(String question);
    }

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0] + "/v1", model = arguments[1];
        List<ChatModel> models = List.of(
            OpenAiChatModel.builder().baseUrl(url).apiKey("none").modelName(model).maxRetries(0).build(),
            AnthropicChatModel.builder().baseUrl(url).apiKey("none").modelName(model).maxRetries(0).build());
        for (var each : models) {
            var assistant = AiServices.builder(Assistant.class).chatModel(each).tools(new Notes()).build();
            System.out.println(assistant.ask("Read the note.").strip());
        }
        List<StreamingChatModel> streaming = List.of(
            OpenAiStreamingChatModel.builder().baseUrl(url).apiKey("none").modelName(model).build(),
            AnthropicStreamingChatModel.builder().baseUrl(url).apiKey("none").modelName(model).build());
        for (var each : streaming) {
            var assistant = AiServices.builder(StreamingAssistant.class)
                .streamingChatModel(each).tools(new Notes()).build();
            var text = new StringBuilder();
            var end = new CompletableFuture<Void>();
            assistant.ask("Read the note.")
                .onPartialResponse(text::append)
                .onCompleteResponse(response -> end.complete(null))
                .onError(end::completeExceptionally)
                .start();
            end.get();
            System.out.println(text.toString().strip());
        }
        var strict = OpenAiChatModel.builder().baseUrl(url).apiKey("none").modelName(model).maxRetries(0)
            .supportedCapabilities(dev.langchain4j.model.chat.Capability.RESPONSE_FORMAT_JSON_SCHEMA)
            .strictJsonSchema(true).build();
        System.out.println("sum " + AiServices.create(Adder.class, strict).add("What is the sum?").total());
        System.exit(0);
    }
}
